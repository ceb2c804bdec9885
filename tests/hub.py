"""A Hub on loopback that serves folders as dataset repositories to the real client, huggingface_hub."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0" * 40


def serve(root):
    """Serve root/OWNER/NAME, each a repository with a README.md; return the endpoint."""
    handler = type("Handler", (Hub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body at once: apart, the second waits 40 ms until the first is acknowledged

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        headers |= {"Content-Length": len(body), "X-Repo-Commit": COMMIT}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, path):
        """Return what the Hub tells about a file or folder of a repository."""
        found = {"type": "directory", "oid": COMMIT, "size": 0, "path": str(path.relative_to(self.repository))}
        if path.is_file():
            found |= {"type": "file", "oid": hashlib.sha1(path.read_bytes()).hexdigest(), "size": path.stat().st_size}
        return found

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        url = urlsplit(self.path)
        kind, _, path = unquote(url.path).partition("datasets/")
        owner, name, *rest = path.split("/") if "/" in path else ("none", "none")
        self.repository = self.root / owner / name
        if not self.repository.is_dir():
            return self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
        action, _, *inside = rest or ["revision", "main"]  # then the revision, then the path in the repository
        path = self.repository.joinpath(*inside)
        if not path.exists():
            return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        if action == "resolve":
            data = path.read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            if requested := self.headers.get("Range"):
                first, last = (int(word or len(data) - 1) for word in requested.removeprefix("bytes=").split("-"))
                headers |= {"Content_Range": f"bytes {first}-{last}/{len(data)}"}
                return self.answer(data[first : last + 1], 206, **headers)
            return self.answer(data, **headers)
        if action == "tree":
            found = path.rglob("*") if "recursive=true" in url.query.lower() else path.iterdir()
            return self.answer([self.entry(path) for path in sorted(found)])
        if action == "paths-info":
            paths = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body)["paths"]
            paths = [self.repository / path for path in paths]
            return self.answer([self.entry(path) for path in paths if path.exists()])
        files = [str(path.relative_to(self.repository)) for path in self.repository.rglob("*") if path.is_file()]
        siblings = [{"rfilename": file} for file in sorted(files)]
        return self.answer({"_id": "0", "id": f"{owner}/{name}", "sha": COMMIT, "tags": [], "siblings": siblings})

    do_HEAD = do_POST = do_GET

    def log_message(self, *words):
        pass
