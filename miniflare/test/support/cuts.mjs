// A proxy between a browser and a Worker that a test cuts for real: the connections that are open, the ones that come,
// or single answers in the middle of their body.

import http from "node:http";

/** @param {string} base  Scheme and authority of the Worker. */
export async function startCuts(base) {
  const { hostname, port } = new URL(base);
  const sockets = new Set();
  /** What of a path's answers is broken off: how many of them are left to break. */
  const breaking = new Map();
  const requests = [];
  let isCut = false;
  const server = http.createServer((request, response) => {
    requests.push({ path: request.url, at: performance.now() });
    const onward = http.request({ hostname, port, path: request.url, method: request.method, headers: { ...request.headers, host: `${hostname}:${port}` } }, (answer) => {
      const path = [...breaking.keys()].find((path) => request.url.includes(path) && breaking.get(path) > 0);
      response.writeHead(answer.statusCode, answer.headers);
      if (path === undefined) return void answer.pipe(response);
      breaking.set(path, breaking.get(path) - 1);
      answer.once("data", (bytes) => response.write(bytes.subarray(0, 20), () => response.destroy()));
    });
    onward.on("error", () => response.destroy());
    request.pipe(onward);
    response.on("close", () => onward.destroy());
  });
  server.on("connection", (socket) => {
    if (isCut) return void socket.destroy();
    sockets.add(socket);
    socket.on("error", () => socket.destroy());
    socket.on("close", () => sockets.delete(socket));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const drop = () => sockets.forEach((socket) => socket.destroy());
  return {
    url: `http://127.0.0.1:${server.address().port}`,
    /** When each request came, in milliseconds, and for what. */
    requests,
    /** Drops the connections and lets none in until `mend`. */
    cut() {
      isCut = true;
      drop();
    },
    mend() {
      isCut = false;
    },
    /** The next `times` answers for paths with `path` in them break off in their body. */
    breakOff(path, times) {
      breaking.set(path, times);
    },
    /** How many of them are to come yet. */
    left: (path) => breaking.get(path) ?? 0,
    async stop() {
      isCut = true;
      drop();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}
