// Figures of a reply: those the server told, added up over continuations, and what follows from them.

import type { Chunk, DrafterFigures, SpeculationFigures, Timings, Usage } from "./wire";

export interface End {
  timings: Timings;
  speculation: SpeculationFigures | null;
  usage: Usage | null;
  seed: number | null;
  nMax: number | null;
}

export function endOf(chunk: Chunk): End {
  return {
    timings: chunk.timings as Timings,
    speculation: chunk.metrics?.speculative_decoding ?? null,
    usage: chunk.usage ?? null,
    seed: chunk.seed ?? null,
    nMax: chunk.speculative?.n_max ?? null,
  };
}

// Two parts of one reply. Of the prompt the later part's figures hold.
export function added(first: End, second: End): End {
  const timings = { ...second.timings };
  timings.predicted_n += first.timings.predicted_n;
  timings.predicted_ms += first.timings.predicted_ms;
  timings.predicted_per_second = rate(timings.predicted_n, timings.predicted_ms);
  if (first.timings.predicted_parts_ms && timings.predicted_parts_ms) {
    const [a, b] = [first.timings.predicted_parts_ms, timings.predicted_parts_ms];
    timings.predicted_parts_ms = { draft: a.draft + b.draft, verify: a.verify + b.verify, host: a.host + b.host };
  }
  timings.draft_n = (first.timings.draft_n ?? 0) + (timings.draft_n ?? 0);
  timings.draft_n_accepted = (first.timings.draft_n_accepted ?? 0) + (timings.draft_n_accepted ?? 0);
  timings.drafters = sums(first.timings.drafters ?? {}, timings.drafters ?? {});
  return { ...second, timings, speculation: steps(first.speculation, second.speculation) };
}

function rate(n: number, ms: number): number {
  return ms > 0 ? (1000 * n) / ms : 0;
}

function sums(first: Record<string, DrafterFigures>, second: Record<string, DrafterFigures>) {
  const summed = { ...first };
  for (const [name, one] of Object.entries(second)) {
    const other = first[name];
    summed[name] = other ? sum(other, one) : one;
  }
  return summed;
}

function sum(a: DrafterFigures, b: DrafterFigures): DrafterFigures {
  const n = a.n_drafts + b.n_drafts;
  const places = Math.max(a.acceptance_rate_per_position.length, b.acceptance_rate_per_position.length);
  const mean = (i: number) =>
    ((a.acceptance_rate_per_position[i] ?? 0) * a.n_drafts + (b.acceptance_rate_per_position[i] ?? 0) * b.n_drafts) /
    Math.max(1, n);
  const verbs = (x: DrafterFigures["ms"], y: DrafterFigures["ms"]) => ({
    begin: x.begin + y.begin,
    draft: x.draft + y.draft,
    accept: x.accept + y.accept,
  });
  const eachPlace = (x: number[] = [], y: number[] = []) =>
    Array.from({ length: Math.max(x.length, y.length) }, (_, i) => (x[i] ?? 0) + (y[i] ?? 0));
  return {
    draft_n_per_position: eachPlace(a.draft_n_per_position, b.draft_n_per_position),
    draft_n_accepted_per_position: eachPlace(a.draft_n_accepted_per_position, b.draft_n_accepted_per_position),
    draft_n: a.draft_n + b.draft_n,
    draft_n_accepted: a.draft_n_accepted + b.draft_n_accepted,
    n_drafts: n,
    n_drafts_accepted: a.n_drafts_accepted + b.n_drafts_accepted,
    acceptance_rate_per_position: Array.from({ length: places }, (_, i) => mean(i)),
    calls: verbs(a.calls, b.calls),
    ms: verbs(a.ms, b.ms),
  };
}

function steps(a: SpeculationFigures | null, b: SpeculationFigures | null): SpeculationFigures | null {
  if (!a || !b) return a ?? b;
  const n = a.num_spec_steps + b.num_spec_steps;
  const drafted = a.num_draft_tokens + b.num_draft_tokens;
  const accepted = a.num_accepted_draft_tokens + b.num_accepted_draft_tokens;
  const length = Math.max(a.acceptance_histogram.length, b.acceptance_histogram.length);
  const weighted = a.mean_acceptance_length * a.num_spec_steps + b.mean_acceptance_length * b.num_spec_steps;
  return {
    mean_acceptance_length: weighted / Math.max(1, n),
    draft_acceptance_rate: drafted ? accepted / drafted : 0,
    acceptance_histogram: Array.from(
      { length },
      (_, i) => (a.acceptance_histogram[i] ?? 0) + (b.acceptance_histogram[i] ?? 0),
    ),
    num_spec_steps: n,
    num_accepted_draft_tokens: accepted,
    num_draft_tokens: drafted,
  };
}

export function percent(share: number): string {
  return `${Math.round(100 * share)}%`;
}

export function seconds(ms: number): string {
  return ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

export function grouped(n: number): string {
  return n.toLocaleString("en-US");
}

// Of the tokens drafted at each place of a draft, the share that was accepted. Where a server does not count places, of
// all drafts.
export function acceptance(of: DrafterFigures): number[] {
  const drafted = of.draft_n_per_position;
  if (!drafted?.length) return of.acceptance_rate_per_position;
  return drafted.map((n, i) => (n ? (of.draft_n_accepted_per_position?.[i] ?? 0) / n : 0));
}
