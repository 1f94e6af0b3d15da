"""The client of boto3, for what obstore cannot ask S3 for. It is optional."""

from __future__ import annotations

import os
from typing import Any

from ckpttool.remote.cloud import address as addresses

_CONNECTIONS = 32


class RefusedError(Exception):
    """The store does not copy parts, or boto3 cannot ask it to: the text says why."""


def service() -> Any:
    """Return boto3's client for S3. It finds credentials as other tools of the cloud do. Raises RefusedError."""
    try:
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
        from botocore.session import UNSIGNED  # type: ignore[import-untyped]
    except ImportError:
        raise RefusedError("boto3 is not installed") from None
    variables, seconds = os.environ, addresses.timeout()
    more: dict[str, Any] = {"signature_version": UNSIGNED} if variables.get("AWS_SKIP_SIGNATURE") == "true" else {}
    if variables.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST") != "true" and addresses.s3_endpoint(variables):
        more["s3"] = {"addressing_style": "path"}  # as obstore asks
    try:
        config = Config(
            connect_timeout=min(seconds, 10),
            read_timeout=seconds,
            retries={"mode": "standard", "total_max_attempts": addresses.RETRIES + 1},
            max_pool_connections=_CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            **more,
        )
        region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION")
        return boto3.client("s3", region_name=region, config=config)
    except (BotoCoreError, ValueError, TypeError) as error:
        raise RefusedError(f"boto3 says: {' '.join(str(error).split())[:200]}") from None
