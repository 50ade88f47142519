"""Whatever the OpenAPI lets a client send, and much that it does not, is answered; never by a 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from serving import Served, made, ran, served  # noqa: F401

EXAMPLES = 4  # of each operation, fitting and not
MAKERS = {("POST", "/sandboxes"), ("POST", "/sandboxes/{id}/fork")}  # every example would cost a sandbox
APART = ("/ports/{port}", "/execute", "/containers/")  # answers of the sandbox; a sandbox each; 500 is in that protocol
ENDS = {("DELETE", "/sandboxes/{id}")}  # the one that the others speak to


def operations(schema: Any) -> Iterator[Any]:
    for found in schema.get_all_operations():
        operation = found.ok()
        label = (operation.method.upper(), operation.path)
        if label not in MAKERS and not any(part in operation.path for part in APART):
            yield operation


class Fuzz:
    """Asks one server, as one user, about one sandbox."""

    def __init__(self, served: Served) -> None:  # noqa: F811
        self.api = served.api()
        self.id = made(self.api, auto_pause_timeout=0)
        self.schema = schemathesis.openapi.from_dict(self.api.get("/openapi.json").json())
        self.tried = 0
        self._url = served.url
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Authorization"] = self.api.headers["Authorization"]

    def ask(self, case: Any) -> None:
        if "id" in case.path_parameters and (case.method.upper(), case.path) not in ENDS:
            case.path_parameters["id"] = self.id
        try:
            answer = case.call(base_url=self._url, session=self._session, timeout=120)
        except requests.exceptions.InvalidHeader:
            return
        self.tried += 1
        assert answer.status_code < 500, f"{case.as_curl_command()}\n{answer.status_code} {answer.text}"

    def all_of(self, operation: Any, mode: GenerationMode) -> None:
        @settings(max_examples=EXAMPLES)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            self.ask(case)

        ask()

    def close(self) -> None:
        self._session.close()


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
def test_no_request_breaks_the_server(served: Served, mode: GenerationMode) -> None:  # noqa: F811
    fuzz = Fuzz(served)
    broken = []
    try:
        for operation in operations(fuzz.schema):
            try:
                fuzz.all_of(operation, mode)
            except Unsatisfiable:
                continue  # nothing that does not fit: it takes no input
            except AssertionError as error:
                broken.append(str(error))
    finally:
        fuzz.close()
    assert not broken, "\n\n".join(broken)
    assert fuzz.tried > 100
    assert ran(fuzz.api, fuzz.id, "echo alive")["stdout"] == "alive\n"
