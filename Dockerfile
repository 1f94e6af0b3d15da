# docker build -t ckpttool .
# docker run --rm -v "$PWD:/data" ckpttool inspect /data/step-1000
# With torch, for `verify-resume trial`: docker build -t ckpttool --build-arg EXTRA='[torch]' .
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRA=""
COPY --from=build /wheels /wheels
RUN set -- /wheels/*.whl && pip install --no-cache-dir "$1$EXTRA" && rm -r /wheels
# What it writes below /data belongs to whoever `docker run --user` names.
WORKDIR /data
ENTRYPOINT ["ckpttool"]
CMD ["--help"]
