"""The usual AWS variables and files: what other tools take from them, a store takes too. Nothing is contacted here."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path

from sandkeep.errors import BadArgument, StoreDenied

_KEYS = ("access_key_id", "secret_access_key", "session_token")

_ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")


def aws_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Arguments first, then variables, then the profile's files; keys are taken together from one place. Without any, and
    without a role named in the variables, it is refused here: the client would go on to ask the machine's metadata
    service, and nobody told us to use that machine's identity."""
    profile = os.environ.get("AWS_PROFILE") or "default"
    credentials = _section(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", profile)
    section = profile if profile == "default" else f"profile {profile}"
    config = _section(os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config", section)
    if "AWS_PROFILE" in os.environ and not credentials and not config:
        raise BadArgument(f"the AWS files have no profile {profile}", "check AWS_PROFILE and ~/.aws/credentials")

    settings = {key: given[key] for key in _KEYS if key in given}
    for source in (
        {key: os.environ.get(f"AWS_{key.upper()}", "") for key in _KEYS},
        {key: credentials.get(f"aws_{key}", "") for key in _KEYS},
        {key: config.get(f"aws_{key}", "") for key in _KEYS},
    ):
        if "access_key_id" not in settings and source["access_key_id"] and source["secret_access_key"]:
            settings.update({key: value for key, value in source.items() if value})
    if "access_key_id" not in settings and not any(os.environ.get(name) for name in _ROLES):
        raise StoreDenied(
            "there are no keys for the bucket",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, write ~/.aws/credentials, or, in code, give both keys",
        )
    region = (
        given.get("region")
        or os.environ.get("AWS_REGION")
        or os.environ.get("AWS_DEFAULT_REGION")
        or config.get("region")
    )
    settings["region"] = region or "us-east-1"
    variables = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint := given.get("endpoint") or variables or config.get("endpoint_url"):
        settings["endpoint"] = endpoint.rstrip("/")
    return settings


def _section(path: str, name: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(Path(path).expanduser())
    except (configparser.Error, UnicodeDecodeError) as error:
        raise BadArgument(
            f"{path} is not a readable AWS file: {type(error).__name__}",
            "mend it, or move it away and set the AWS variables",
        ) from None
    return dict(parser[name]) if parser.has_section(name) or name == parser.default_section else {}
