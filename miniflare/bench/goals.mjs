// The goals of the benchmark, each as a ratio within one run where it can be one.

import { median } from "./measures.mjs";

/** @returns {{goal: string, storage?: string, wanted: string, got?: number, met?: boolean}[]} `got` is missing where it was not measured. */
export function goals({ samples, facts, contestants }) {
  const list = [];
  const value = (storage, what, name, number) => {
    const values = samples[storage]?.[what]?.[name]?.[number];
    return values && median(values);
  };
  const ratio = (storage, what, number, above, below) => {
    const [a, b] = [value(storage, what, above, number), value(storage, what, below, number)];
    return a === undefined || b === undefined ? undefined : a / b;
  };
  const least = (goal, storage, wanted, got) => list.push({ goal, storage, wanted: `≥ ${wanted}`, got, met: got === undefined ? undefined : got >= wanted });
  const most = (goal, storage, wanted, got) => list.push({ goal, storage, wanted: `≤ ${wanted}`, got, met: got === undefined ? undefined : got <= wanted });

  for (const storage of ["memory", "disk"].filter((storage) => samples[storage])) {
    for (const [per, wanted, peer] of [[1, 0.85, "B"], [10, 0.9, "B2"], [100, 1.8, "B"]]) {
      const what = `append ${per} x 200`;
      least(`append, ${per} per commit, against ${peer}`, storage, wanted, ratio(storage, what, "chunksPerSecond", "ours", peer));
      if (contestants.some(({ name }) => name === "A10")) {
        least(`append, ${per} per commit, against agents/streams`, storage, 2, ratio(storage, what, "chunksPerSecond", "ours", "A10"));
      }
    }
    for (const readers of [1, 10, 100]) {
      most(`live tail p99, ${readers} readers, against B2`, storage, 1.2, ratio(storage, `live ${readers}`, "p99", "ours", "B2"));
      // It has a text every 5 ms; on a machine where nobody's writer is on time, ours may be as late as theirs.
      const late = Math.max(5, value(storage, `live ${readers}`, "B2", "writerLate") ?? 0);
      most(`live tail, ${readers} readers: how late the writer is, p99 ms`, storage, late, value(storage, `live ${readers}`, "ours", "writerLate"));
    }
    least("replay, against B2", storage, 0.9, ratio(storage, "replay", "mbPerSecond", "ours", "B2"));
    most("another request's worst wait meanwhile, against B2", storage, 1.5, ratio(storage, "replay", "worstWait", "ours", "B2"));
    const short = value(storage, "attach 1000", "ours", "attach");
    const long = value(storage, "attach 1000000", "ours", "attach");
    most("attach at a million chunks, against a thousand", storage, 1.1, short && long && long / short);
  }
  most("log rows written by a turn of 400 chunks", undefined, 42, facts.rows?.ours?.logRows);
  most("database of 100 000 chunks, against their JSON", undefined, 1.1, facts.rows?.ours?.sizeRatio);
  most("extra rows written by compaction for each that was appended", undefined, 0.25, facts.rows?.ours?.extraRows);
  most("memory of an unread replay, MiB", undefined, 10, value("memory", "unread", "ours", "mib"));
  const churn = ["ours", "B"].map((name) => value("memory", "churn", name, "mib"));
  if (churn.every((mib) => mib !== undefined)) {
    // A MiB is what two runs of the same contestant differ by.
    most(`memory over ${facts.attaches} attaches, MiB more than B`, undefined, 1, churn[0] - Math.max(0, churn[1]));
  }
  return list;
}
