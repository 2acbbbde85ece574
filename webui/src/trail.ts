// The tokens of a reply in the order in which they were made: who guessed each, in which step, and where in the shown
// text it stands. Numbers in plain arrays: a reply may have tens of thousands of tokens.

import { TARGET } from "./sources";
import type { Detail, Step } from "./wire";

const PARTS = ["text", "thinking"] as const;
export type Part = (typeof PARTS)[number];

export interface StepRecord {
  first: number; // its first token
  drafter: string | null;
  drafted: string[];
  nAccepted: number;
  whyNot: string | null;
  known: boolean; // false: the server said only which tokens came together
}

// `length` characters of a part from `at` on are those of the raw text from `raw` on.
interface Stretch {
  at: number;
  raw: number;
  length: number;
}

export interface Run {
  from: number;
  to: number;
  source: string;
}

export interface Saved {
  pieces: string[];
  sources: string[];
  steps: StepRecord[];
  stretches: Record<Part, Stretch[]>;
}

export class Trail {
  pieces: string[] = [];
  starts: number[] = []; // of each token in the raw text, which is all pieces in a row
  sources: string[] = [];
  stepOf: number[] = [];
  steps: StepRecord[] = [];
  stretches: Record<Part, Stretch[]> = { text: [], thinking: [] };
  private length = 0;
  private pending = ""; // raw text that no part has taken yet
  private placed: Record<Part, number> = { text: 0, thinking: 0 };

  get n(): number {
    return this.pieces.length;
  }

  // A chunk's tokens. `text` stands for them where the server sends no pieces.
  add(detail: Detail | undefined, text: string): void {
    if (!detail) {
      if (text) this.push([text], [null], []);
      return;
    }
    const pieces = detail.pieces ?? [text, ...detail.sources.slice(1).map(() => "")];
    this.push(pieces, detail.sources, detail.steps ?? []);
  }

  private push(pieces: string[], sources: (string | null)[], steps: Step[]): void {
    const first = this.n;
    const marks = marked(steps, first, pieces.length);
    let step = this.steps.length - 1;
    for (const [i, piece] of pieces.entries()) {
      while (marks[0] && marks[0].first <= first + i) {
        this.steps.push(marks.shift() as StepRecord);
        step++;
      }
      this.pieces.push(piece);
      this.sources.push(sources[i] ?? TARGET);
      this.starts.push(this.length);
      this.stepOf.push(step);
      this.length += piece.length;
    }
    this.steps.push(...marks); // steps whose tokens a stop string cut off
    this.pending += pieces.join("");
  }

  // Says that the part goes on with this text: some of the tokens that came last, without the model's own markers.
  place(part: Part, text: string): void {
    const start = this.length - this.pending.length;
    const found = this.pending.indexOf(text);
    if (found >= 0) {
      this.stretch(part, start + found, text.length);
      this.pending = this.pending.slice(found + text.length);
    } else {
      this.placeByCharacter(part, text, start);
    }
    this.placed[part] += text.length;
  }

  private placeByCharacter(part: Part, text: string, start: number): void {
    let taken = 0;
    const from = this.placed[part];
    for (let i = 0; i < text.length; i++) {
      const found = this.pending.indexOf(text[i] as string, taken);
      if (found < 0) continue;
      this.stretch(part, start + found, 1, from + i);
      taken = found + 1;
    }
    this.pending = this.pending.slice(taken);
  }

  private stretch(part: Part, raw: number, length: number, at = this.placed[part]): void {
    const list = this.stretches[part];
    const last = list.at(-1);
    if (last && last.at + last.length === at && last.raw + last.length === raw) last.length += length;
    else list.push({ at, raw, length });
  }

  // The token of a place in a part's text, or -1.
  tokenAt(part: Part, at: number): number {
    const list = this.stretches[part];
    const stretch = list[after(list, at, (one) => one.at) - 1];
    if (!stretch || at >= stretch.at + stretch.length) return -1;
    return after(this.starts, stretch.raw + at - stretch.at, (start) => start) - 1;
  }

  // Whose the text of a part between two places is, in runs of one source.
  runs(part: Part, from: number, to: number): Run[] {
    const list = this.stretches[part];
    const found: Run[] = [];
    for (let i = Math.max(0, after(list, from, (one) => one.at) - 1); i < list.length; i++) {
      const one = list[i] as Stretch;
      if (one.at >= to) break;
      const start = Math.max(from, one.at);
      this.runsOf(one, start, Math.min(to, one.at + one.length), found);
    }
    return found;
  }

  private runsOf(stretch: Stretch, from: number, to: number, found: Run[]): void {
    const shift = stretch.at - stretch.raw;
    let token = after(this.starts, from - shift, (start) => start) - 1;
    for (let at = from; at < to; token++) {
      const next = token + 1 < this.n ? (this.starts[token + 1] as number) : this.length;
      const end = Math.min(to, next + shift);
      const source = this.sources[token] as string;
      const last = found.at(-1);
      if (end > at) {
        if (last && last.to === at && last.source === source) last.to = end;
        else found.push({ from: at, to: end, source });
      }
      at = Math.max(at, end);
      if (token + 1 >= this.n) break;
    }
  }

  // Where in a part's text a token stands; null if it is not shown there.
  placeOf(token: number): { part: Part; from: number; to: number } | null {
    const raw = this.starts[token] as number;
    const end = raw + (this.pieces[token] as string).length;
    for (const part of PARTS) {
      const list = this.stretches[part];
      const stretch = list.find((one) => one.raw < end && raw < one.raw + one.length);
      if (stretch) {
        const shift = stretch.at - stretch.raw;
        const to = Math.min(end, stretch.raw + stretch.length) + shift;
        return { part, from: Math.max(raw, stretch.raw) + shift, to };
      }
    }
    return null;
  }

  counts(): Map<string, number> {
    const counted = new Map([[TARGET, 0]]);
    for (const source of this.sources) counted.set(source, (counted.get(source) ?? 0) + 1);
    return counted;
  }

  saved(): Saved {
    const { pieces, sources, steps, stretches } = this;
    return { pieces, sources, steps, stretches };
  }

  static from(saved: Saved): Trail {
    const trail = new Trail();
    const { pieces, sources, steps, stretches } = saved;
    Object.assign(trail, { pieces, sources, steps, stretches });
    let step = -1;
    for (const [i, piece] of pieces.entries()) {
      while (steps[step + 1] && (steps[step + 1] as StepRecord).first <= i) step++;
      trail.starts.push(trail.length);
      trail.stepOf.push(step);
      trail.length += piece.length;
    }
    for (const part of PARTS) {
      const last = stretches[part].at(-1);
      trail.placed[part] = last ? last.at + last.length : 0;
    }
    return trail;
  }
}

// The steps of a chunk with the tokens at which they begin: a step keeps its accepted tokens and one of the target's own.
function marked(steps: Step[], first: number, nTokens: number): StepRecord[] {
  if (!steps.length) {
    const nothing = { drafter: null, drafted: [], nAccepted: 0, whyNot: null, known: false };
    return nTokens ? [{ first, ...nothing }] : [];
  }
  let at = first;
  return steps.map((step) => {
    const record = {
      first: at,
      drafter: step.drafter,
      drafted: step.drafted_pieces ?? [],
      nAccepted: step.n_accepted,
      whyNot: step.why_not,
      known: true,
    };
    at += step.n_accepted + 1;
    return record;
  });
}

// How many entries of a sorted list are at most `value`.
function after<T>(list: readonly T[], value: number, of: (one: T) => number): number {
  let low = 0;
  let high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(list[middle] as T) <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
