"""Objects in a bucket through obstore: S3 and whatever speaks it, Google Cloud Storage, Azure.

Retries with back-off are obstore's; here every failure becomes one of our errors, and no answer that is too short passes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from sandkeep.errors import (
    BadArgument,
    Corrupt,
    NotFound,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreMissing,
    StoreUnreachable,
)
from sandkeep.store.aws import aws_settings
from sandkeep.store.objects import check_name, check_prefix

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

LARGE = 1 << 20  # a request with more bytes than this may take longer
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_SAID = re.compile(r"<Message>([^<]{1,300})</Message>")
_STATUS = re.compile(r"status code: (\d{3})")
_VARIABLES = {"gs": "GOOGLE_", "az": "AZURE_"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "StorageFull", "AccountQuotaExceeded"}


class Bucket:
    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        timeout: float = 30.0,
        retry: float = 30.0,
        allow_http: bool = False,
    ) -> None:
        """`timeout` is for one request (eight times as long for a large one), `retry` for all attempts."""
        if not bucket:
            raise BadArgument(f"the {scheme}:// URL names no bucket", f"write {scheme}://bucket/prefix")
        if prefix:
            check_name(prefix)
        if (access_key is None) != (secret_key is None):
            raise BadArgument(
                "an access key and its secret go together", "give both, or neither to use the AWS variables and files"
            )
        self.url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self.place = self.url
        self.bucket = bucket
        self.parallel = 8
        self.direct = False
        given = {
            "region": region,
            "endpoint": endpoint,
            "access_key_id": access_key,
            "secret_access_key": secret_key,
            "session_token": session_token,
        }
        config = {key: value for key, value in given.items() if value is not None}
        if scheme == "s3":
            config = aws_settings(config)
            allow_http = _http_allowed(config.get("endpoint"), allow_http)
            self.place = f"{self.url} {config.get('endpoint', '')}"
        elif config:
            raise BadArgument(f"{next(iter(config))} means nothing for {scheme}://", "use that service's own variables")
        elif scheme in _VARIABLES and not any(name.startswith(_VARIABLES[scheme]) for name in os.environ):
            raise StoreDenied(
                "there are no keys for the bucket", f"set the {_VARIABLES[scheme]}… variables of that service"
            )
        retries: RetryConfig = {
            "max_retries": 8 if retry > 0 else 0,
            "retry_timeout": timedelta(seconds=retry),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
        }

        def make(seconds: float) -> Any:
            client: ClientConfig = {
                "timeout": timedelta(seconds=seconds),
                "connect_timeout": timedelta(seconds=min(seconds, 10)),
                "allow_http": allow_http,
            }
            more: dict[str, Any] = {"prefix": prefix or None, "client_options": client, "retry_config": retries}
            if scheme == "s3":
                return S3Store(bucket, virtual_hosted_style_request=False, **config, **more)  # type: ignore[arg-type]
            if scheme == "gs":
                return GCSStore(bucket, **more)
            if scheme == "az":
                return AzureStore(bucket, **more)
            raise BadArgument(f"{scheme}:// is no store", "give a folder, s3://, gs:// or az://")

        try:
            self._quick, self._patient = make(timeout), make(timeout * 8)
        except BaseError as error:
            raise BadArgument(f"{self.url} can't be used: {_first(error)}") from error

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None:
        whole = data[0] if len(data) == 1 else b"".join(data)
        with self._typed("write", check_name(name), write=True):
            obstore.put(self._for(len(whole)), name, whole, use_multipart=False)

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        if length == 0:
            if self.size(name) is None:
                raise self._absent(name)
            return b""
        with self._typed("read", name):
            if length is None:
                found = obstore.get(self._patient, name, options={"range": {"offset": offset}} if offset else {})
                data, want = bytes(found.bytes()), found.range[1] - found.range[0]
                if offset + want != found.meta["size"]:
                    want = found.meta["size"] - offset
            else:
                data, want = bytes(obstore.get_range(self._for(length), name, start=offset, length=length)), length
        if len(data) != want:
            raise Corrupt(f"{name} gave {len(data)} bytes, {want} were expected", "run verify", object=name)
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        check_prefix(prefix)
        with self._typed("list", prefix):
            for page in obstore.list(self._quick, prefix.rstrip("/") or None, offset=after or None, chunk_size=1000):
                for meta in page:
                    yield meta["path"], meta["size"], meta["last_modified"].timestamp()

    def delete(self, names: Iterable[str]) -> None:
        rest = iter(names)
        while batch := [check_name(name) for name in islice(rest, 1000)]:
            with self._typed("delete", batch[0], write=True):
                try:
                    obstore.delete(self._quick, batch)
                except FileNotFoundError:
                    for name in batch:
                        try:
                            obstore.delete(self._quick, name)
                        except FileNotFoundError as error:
                            if "NoSuchBucket" in str(error):
                                raise

    def newest(self, prefix: str) -> Iterator[str] | None:
        return None

    def size(self, name: str) -> int | None:
        try:
            with self._typed("look at", check_name(name)):
                return int(obstore.head(self._quick, name)["size"])
        except NotFound:
            return None

    def _for(self, length: int) -> Any:
        return self._patient if length > LARGE else self._quick

    def _absent(self, name: str) -> NotFound:
        return NotFound(f"{name} is not in the store {self.url}")

    @contextmanager
    def _typed(self, verb: str, name: str, write: bool = False) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise self._error(error, f"{verb} {name} in {self.url}", name, write) from None

    def _error(self, error: Exception, what: str, name: str, write: bool) -> Exception:
        """Only the server's code and message are shown: the rest of its answer may carry parts of a signature."""
        text = str(error)
        codes, said, status = _CODE.findall(text), _SAID.findall(text), _STATUS.findall(text)
        code, number = (codes or [""])[0], int((status or ["0"])[0])
        why = f"{code}: {said[0]}" if code and said else code or (f"HTTP {number}" if number else _first(error))
        if code in ("NoSuchBucket", "ContainerNotFound") or (isinstance(error, FileNotFoundError) and write):
            return StoreMissing(
                f"there is no bucket {self.bucket} ({self.url})", "make the bucket, or check the URL and endpoint"
            )
        if isinstance(error, FileNotFoundError):
            return self._absent(name)
        if code in ("RequestTimeTooSkewed", "RequestExpired"):
            return StoreDenied(f"not allowed to {what}: this machine's clock is wrong ({why})", "set the clock")
        if code in _FULL or number == 507:
            return StoreFull(f"no space to {what} ({why})", "raise the quota, or forget checkpoints and run gc")
        if number in (401, 403) or code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
            return StoreDenied(
                f"not allowed to {what} ({why})", "check the access key, its secret and its permissions on the bucket"
            )
        if number == 416:
            return Corrupt(f"{name} ends before what was asked of it", "run verify", object=name)
        if number and number < 500 and number not in (408, 429):
            return StoreError(f"could not {what} ({why})", "check the URL, region and endpoint")
        return StoreUnreachable(f"could not {what} ({why})", "check the endpoint and the network, then try again")


def _first(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:300]


def _http_allowed(endpoint: str | None, asked: bool) -> bool:
    """Plain HTTP only on this machine, unless it was asked for."""
    if endpoint is None:
        return False
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise BadArgument("the endpoint is not an http(s) address", "write it as https://host:port")
    if parts.scheme == "https":
        return False
    try:
        loopback = ip_address(parts.hostname).is_loopback
    except ValueError:
        loopback = parts.hostname == "localhost" or parts.hostname.endswith(".localhost")
    if not loopback and not asked:
        raise BadArgument(
            "plain http to another machine would show everything on the way",
            "use https; in code, allow_http=True permits it",
        )
    return True
