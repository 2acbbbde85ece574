// Colours of text without elements for them: ranges in CSS custom highlights, made only for what is near the window.

import { type Signal, effect } from "@preact/signals";
import { tintOf, TARGET, TINTS } from "./sources";
import type { Part, Trail } from "./trail";

// `length` characters of a text node from `offset` on show those of the reply's part from `at` on.
export interface Segment {
  at: number;
  node: Text;
  offset: number;
  length: number;
}

// A range of a text node and the name of a highlight: syntax in code.
export interface Colour {
  name: string;
  node: Text;
  from: number;
  to: number;
}

const MARGIN = "600px 0px"; // around the window, so that scrolling meets text that is coloured already
const canPaint = typeof Highlight === "function" && "highlights" in CSS;
const inks = new Map<string, Highlight>();
const colours = new Map<string, Highlight>();

function highlight(kind: Map<string, Highlight>, name: string): Highlight {
  let found = kind.get(name);
  if (!found) {
    found = new Highlight();
    kind.set(name, found);
    if (kind === colours) CSS.highlights.set(name, found);
  }
  return found;
}

// Shows the tints as long as the signal says so.
export function tintWhile(on: Signal<string>): void {
  if (!canPaint) return;
  for (const tint of TINTS) highlight(inks, `ink-${tint}`);
  effect(() => {
    for (const [name, ink] of inks) {
      if (on.value === "yes") CSS.highlights.set(name, ink);
      else CSS.highlights.delete(name);
    }
  });
}

function staticRange(node: Text, from: number, to: number): StaticRange {
  return new StaticRange({ startContainer: node, startOffset: from, endContainer: node, endOffset: to });
}

// A block of shown text. Its text is painted while it is near the window.
export class Painted {
  private ranges: [Highlight, StaticRange][] = [];
  private isNear = false;
  segments: Segment[] = [];
  colours: Colour[] = [];

  constructor(
    readonly element: HTMLElement,
    private readonly trail: Trail,
    readonly part: Part,
  ) {
    blocks.set(element, this);
    watcher?.observe(element);
  }

  // After segments or colours have changed.
  repaint(): void {
    if (!this.isNear) return;
    this.wipe();
    if (!canPaint) return;
    for (const segment of this.segments) this.ink(segment);
    for (const { name, node, from, to } of this.colours) {
      this.put(highlight(colours, name), staticRange(node, from, Math.min(to, node.length)));
    }
  }

  // Only what was added at the end of the last segment's node.
  extend(segment: Segment): void {
    this.segments.push(segment);
    if (this.isNear && canPaint) this.ink(segment);
  }

  private ink({ at, node, offset, length }: Segment): void {
    for (const { from, to, source } of this.trail.runs(this.part, at, at + length)) {
      if (source === TARGET) continue;
      const range = staticRange(node, from - at + offset, to - at + offset);
      this.put(highlight(inks, `ink-${tintOf(source)}`), range);
    }
  }

  private put(into: Highlight, range: StaticRange): void {
    into.add(range);
    this.ranges.push([into, range]);
  }

  private wipe(): void {
    for (const [from, range] of this.ranges) from.delete(range);
    this.ranges = [];
  }

  near(isNear: boolean): void {
    if (isNear === this.isNear) return;
    this.isNear = isNear;
    if (isNear) this.repaint();
    else this.wipe();
  }

  drop(): void {
    watcher?.unobserve(this.element);
    this.wipe();
    this.isNear = false;
  }

  // The place in the part's text that a place in a node shows, or -1.
  placeOf(node: Node, offset: number): number {
    const found = this.segments.find(
      (one) => one.node === node && one.offset <= offset && offset < one.offset + one.length,
    );
    return found ? found.at + offset - found.offset : -1;
  }

  // The nodes' ranges that show a stretch of the part's text.
  rangesOf(from: number, to: number): Range[] {
    return this.segments
      .filter((one) => one.at < to && from < one.at + one.length)
      .map((one) => {
        const range = document.createRange();
        range.setStart(one.node, Math.max(from, one.at) - one.at + one.offset);
        range.setEnd(one.node, Math.min(to, one.at + one.length) - one.at + one.offset);
        return range;
      });
  }
}

const blocks = new WeakMap<Element, Painted>();
const watcher =
  typeof IntersectionObserver === "function"
    ? new IntersectionObserver(
        (seen) => {
          for (const one of seen) blocks.get(one.target)?.near(one.isIntersecting);
        },
        { rootMargin: MARGIN },
      )
    : null;

// The block that shows a node.
export function blockOf(node: Node): Painted | null {
  for (let one: Node | null = node; one; one = one.parentNode) {
    const found = one instanceof Element && blocks.get(one);
    if (found) return found;
  }
  return null;
}

const current = canPaint ? new Highlight() : null;
if (current) {
  current.priority = 1;
  CSS.highlights.set("ink-current", current);
}

// Marks the token that is being looked at.
export function markCurrent(ranges: Range[]): void {
  current?.clear();
  for (const range of ranges) current?.add(range);
}
