// An object class whose statements are counted: rows written by kind of statement and table, and the database's size.

const NAMED = /^\s*(?:(INSERT)(?:\s+OR\s+\w+)?\s+INTO|(UPDATE)|(DELETE)\s+FROM|(CREATE|DROP)\s+TABLE)\s+(\w+)/i;

/** `Inner` with a route `/{session}/counter`, which tells the counts and forgets them. */
export function counted(Inner) {
  return class {
    #sql;
    #inner;
    #open = [];

    constructor(ctx, env) {
      this.#sql = ctx.storage.sql;
      const exec = this.#sql.exec.bind(this.#sql);
      this.#sql.exec = (statement, ...bindings) => {
        const cursor = exec(statement, ...bindings);
        const [, insert, update, remove, remake, table] = NAMED.exec(statement) ?? [];
        if (table) this.#open.push([`${(insert ?? update ?? remove ?? remake).toLowerCase()} ${table}`, cursor]);
        return cursor;
      };
      this.#inner = new Inner(ctx, env);
    }

    fetch(request) {
      if (!new URL(request.url).pathname.endsWith("/counter")) return this.#inner.fetch(request);
      const rows = {};
      for (const [name, cursor] of this.#open) rows[name] = (rows[name] ?? 0) + cursor.rowsWritten;
      this.#open = [];
      return Response.json({ rows, databaseBytes: this.#sql.databaseSize });
    }

    alarm(...event) {
      return this.#inner.alarm?.(...event);
    }
  };
}
