"""Google's dialect of S3 over moto, run as a program: `python google_over_moto.py PORT`.

Generations become conditions on entity tags and back; all else the two dialects have in common.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_MOTO = DomainDispatcherApplication(create_backend_app)


def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Translate a request, and the head of its answer."""
    environ["HTTP_AUTHORIZATION"] = "AWS4-HMAC-SHA256 Credential=holdall/20261101/us-east-1/s3/aws4_request"
    if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
        environ["HTTP_IF_NONE_MATCH"] = "*"

    def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        tags = [value for name, value in headers if name.lower() == "etag"]
        generation = zlib.crc32(tags[0].encode()) if tags else 0
        return start(status, [*headers, ("x-goog-generation", str(generation))], *rest)

    answer: Iterable[bytes] = _MOTO(environ, started)
    return answer


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), application, threaded=True).serve_forever()
