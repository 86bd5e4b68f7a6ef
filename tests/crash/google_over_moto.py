"""A server with Google's dialect of S3, which translates for moto. Run it with `python google_over_moto.py PORT`.

It translates generations to conditions on entity tags and back. Everything else is equal in both dialects.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_MOTO = DomainDispatcherApplication(create_backend_app)


def translate(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Translate a request and the headers of its answer."""
    environ["HTTP_AUTHORIZATION"] = "AWS4-HMAC-SHA256 Credential=holdall/20261101/us-east-1/s3/aws4_request"
    if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
        environ["HTTP_IF_NONE_MATCH"] = "*"

    def start_response(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        tags = [value for name, value in headers if name.lower() == "etag"]
        generation = zlib.crc32(tags[0].encode()) if tags else 0
        return start(status, [*headers, ("x-goog-generation", str(generation))], *rest)

    answer: Iterable[bytes] = _MOTO(environ, start_response)
    return answer


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), translate, threaded=True).serve_forever()
