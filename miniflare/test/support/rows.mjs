// What a session's database holds: read from a copy, so that what runs is not disturbed, or changed while nothing runs.

import { copyFileSync, existsSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { basename, join } from "node:path";
import { DatabaseSync } from "node:sqlite";

const FILES = ["", "-wal", "-shm"];

/** The rows of a query over the session's database, as it stands on disk. */
export function rowsOf(workers, sessionId, query) {
  return inCopy(fileOf(workers, sessionId), (database) => database.prepare(query).all().map((row) => ({ ...row })));
}

/** Changes the database of a session. workerd must not be running. */
export function change(workers, sessionId, ...statements) {
  atRest(workers);
  const database = new DatabaseSync(fileOf(workers, sessionId));
  try {
    for (const statement of statements) database.exec(statement);
  } finally {
    database.close();
  }
}

/** Removes the database of a session: its object knows nothing any more. workerd must not be running. */
export function forget(workers, sessionId) {
  atRest(workers);
  const path = fileOf(workers, sessionId);
  for (const end of FILES) rmSync(path + end, { force: true });
}

function atRest(workers) {
  if (workers.workerdPids().length > 0) throw new Error("workerd is running");
}

/** By the harness's workers: where sessions were found. */
const found = new WeakMap();

function fileOf(workers, sessionId) {
  if (!found.has(workers)) found.set(workers, new Map());
  const files = found.get(workers);
  for (const { path } of files.has(sessionId) ? [] : workers.databases()) {
    const id = inCopy(path, (database) => {
      const has = database.prepare("SELECT 1 FROM sqlite_master WHERE name = 'ra_session'").get();
      return has && database.prepare("SELECT session_id FROM ra_session").get()?.session_id;
    });
    if (id) files.set(id, path);
  }
  const path = files.get(sessionId);
  if (!path) throw new Error(`no database holds ${sessionId}`);
  return path;
}

/** What `read` makes of a copy of a database. */
function inCopy(path, read) {
  const folder = mkdtempSync(join(tmpdir(), "remote-agents-rows-"));
  try {
    const copy = join(folder, basename(path));
    for (const end of FILES.slice(0, 2)) if (existsSync(path + end)) copyFileSync(path + end, copy + end);
    const database = new DatabaseSync(copy);
    try {
      return read(database);
    } finally {
      database.close();
    }
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}
