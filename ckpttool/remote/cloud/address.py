"""Addresses of object stores, and clients for them.

    s3://bucket/key    gs://bucket/key    az://container/key    https://host/key

Credentials are those that the tools of a cloud find: variables, the roles of a machine, and with boto3 the profiles and
logins in `~/.aws`. They are given to obstore alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from ckpttool.errors import UsageError
from ckpttool.remote.variables import seconds_of
from ckpttool.storage.stores import query_of
from ckpttool.version import __version__

RETRIES = 5  # after the first attempt
FIRST_WAIT = 0.2  # seconds before the second; each further one is twice as long
_PATIENCE = 90  # seconds in which a request is repeated
TIMEOUT = 60.0  # seconds without a byte
_VARIABLE = "CKPTTOOL_CLOUD_TIMEOUT"
_WEB = ("http", "https")


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """An address: `BucketAddress("s3", "bucket", "run/step-100")`."""

    scheme: str
    bucket: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    @property
    def root(self) -> str:
        """The address of the bucket, or of the host."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def is_web(self) -> bool:
        """Whether this is on a web server, which lists nothing."""
        return self.scheme in _WEB


def parse(text: str) -> BucketAddress:
    """Return the parsed address. Raises UsageError if `text` is not one. Pure."""
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    key = key.rstrip("/")
    if not bucket or any(char in bucket for char in "@?#*[ \\"):
        raise UsageError(f"`{text}` names no bucket", hint=f"write `{scheme}://bucket/path`")
    is_odd = any(char < " " or char == "\x7f" for char in key)
    if key and (is_odd or any(part in ("", ".", "..") for part in key.split("/"))):
        raise UsageError(f"`{text}`: `{key}` is not a path in a bucket", hint=f"write `{scheme}://{bucket}/path`")
    return BucketAddress(scheme, bucket, key)


def timeout() -> float:
    """Return the time-out in seconds. Raises UsageError if `CKPTTOOL_CLOUD_TIMEOUT` is not a number."""
    return seconds_of(_VARIABLE, TIMEOUT)


def connect(address: BucketAddress) -> Any:
    """Return obstore's client for the bucket of an address. Raises UsageError, and the exceptions of obstore."""
    seconds = timeout()
    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=min(seconds, 10)),
            "read_timeout": timedelta(seconds=seconds),
            "timeout": timedelta(seconds=10 * seconds),
            "user_agent": f"ckpttool/{__version__}",
            "allow_http": address.scheme == "http" or _endpoint(address, os.environ).startswith("http://"),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=_PATIENCE),
            "backoff": {"init_backoff": timedelta(seconds=FIRST_WAIT), "max_backoff": timedelta(seconds=10), "base": 2},
        },
    }
    if address.is_web:
        # What a signed address has behind its `?` goes to the server, and nowhere else.
        return HTTPStore(address.root + query_of(str(address)), **options)
    if address.scheme == "gs":
        return GCSStore(address.bucket, **options)
    if address.scheme == "az":
        return AzureStore(address.bucket, **_connection_string(os.environ), **options)
    if not options["client_options"]["allow_http"] and "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        # TLS protects the bytes, and their MD5 is compared; a second digest takes a fifth of the time of a write.
        options["unsigned_payload"] = True
    return S3Store(address.bucket, **_profile(os.environ), **options)


def _endpoint(address: BucketAddress, variables: Mapping[str, str]) -> str:
    """Return the address of a server that stands in for that of the cloud, or nothing."""
    if address.scheme == "az":
        emulated = variables.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
        named = variables.get("AZURE_STORAGE_ENDPOINT") or variables.get("AZURE_ENDPOINT")
        return "http://" if emulated else named or str(_connection_string(variables).get("endpoint", ""))
    if address.scheme == "gs":
        return variables.get("GOOGLE_BASE_URL", "")
    return s3_endpoint(variables)


def s3_endpoint(variables: Mapping[str, str]) -> str:
    """Return the address of a server that stands in for that of S3, or nothing. Pure."""
    return variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL") or ""


def _connection_string(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what `AZURE_STORAGE_CONNECTION_STRING` says, which the tools of Azure go by. Pure."""
    text = variables.get("AZURE_STORAGE_CONNECTION_STRING", "")
    parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
    names = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    return {names[name]: value for name, value in parts.items() if name in names}


def _profile(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what boto3 finds in profiles and logins, and what obstore does not find in the variables itself."""
    found: dict[str, Any] = {}
    if endpoint := variables.get("AWS_ENDPOINT_URL_S3"):
        found["endpoint"] = endpoint
    is_told = "AWS_ACCESS_KEY_ID" in variables or "AWS_SKIP_SIGNATURE" in variables
    if is_told or find_spec("boto3") is None:
        return found
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        provider = Boto3CredentialProvider()
    except Exception:
        # A profile that is not there, or none at all: obstore asks the machine for its role.
        if "AWS_PROFILE" in variables:
            name = variables["AWS_PROFILE"]
            message = f"`AWS_PROFILE={name}`: boto3 finds no credentials of this profile"
            raise UsageError(message, hint="`aws sts get-caller-identity` says why") from None
        return found
    return {**found, "credential_provider": provider}
