// A part of a reply as it grows on the page. What is finished stays as it is: a block of Markdown is rendered when the
// next one begins, code is appended to, and only a short open block is made anew with every frame.

import { code, type CodeBlock } from "./code_block";
import { rendered } from "./markdown";
import { Painted } from "./paint";
import type { Part, Trail } from "./trail";

const BUDGET_MS = 8; // of a frame
const SHORT = 1500; // characters of an open block that are rendered with every frame
const LONG = 6000; // characters after which a block ends with its line
const PIECE = 3000; // characters of one element of plain text, which is laid out as a whole
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const JSON_TEXT = /^\s*(?:\{\s*(?:"|\}?\s*$)|\[\s*(?:[[{"]|\]?\s*$))/;
// Code without a fence, as the demo writes it: that begins like code, or is indented.
const BARE_CODE = /^(?:(?:async def|def|class|fn|func|function) \w+\s*[(:{<]|""")|^(?: {4}|\t)\S/;
const LIST = /^ {0,3}(?:[-*+]|\d{1,9}[.)])\s/;

export class Written {
  private taken = 0; // characters that are on the page
  private block = ""; // the open block, or the open piece of plain text
  private blockAt = 0;
  private line = ""; // the line that is being written
  private shown: Painted | null = null; // the open block
  private code: { marker: string; block: CodeBlock; text: string } | null = null;
  private afterBlank = false;
  readonly blocks: Painted[] = [];

  constructor(
    private readonly host: HTMLElement,
    private readonly trail: Trail,
    private readonly part: Part,
    private readonly isMarkdown: boolean,
  ) {}

  // Brings what the text has more. False if a frame's time was not enough: call again in the next one.
  update(text: string, isWhole: boolean): boolean {
    const started = performance.now();
    while (this.taken < text.length) {
      if (performance.now() - started > BUDGET_MS) {
        this.show();
        return false;
      }
      const newline = text.indexOf("\n", this.taken);
      const end = Math.min(newline < 0 ? text.length : newline + 1, this.taken + PIECE);
      this.take(text.slice(this.taken, end));
      this.taken = end;
    }
    if (isWhole) this.end();
    else this.show();
    return true;
  }

  // A first line may show that the whole text is code.
  private isBareCode(line: string): boolean {
    if (this.blockAt || this.block.trim() !== line.trim()) return false;
    const kind = JSON_TEXT.test(line) ? "json" : BARE_CODE.test(line) ? "python" : null;
    if (!kind) return false;
    const text = this.block;
    this.discard();
    this.openCode("", kind);
    this.append(text);
    return true;
  }

  private take(text: string): void {
    if (!this.isMarkdown || this.code) this.append(text);
    this.line += text;
    if (this.isMarkdown && !this.code) this.block += text;
    if (!text.endsWith("\n")) {
      if (this.isMarkdown && !this.code && this.block.length > LONG) this.closeBlock(this.block.length);
      return;
    }
    const line = this.line.slice(0, -1);
    this.line = "";
    if (this.code) this.codeLine(line, true);
    else if (this.isMarkdown) this.textLine(line);
  }

  private codeLine(line: string, isEnded: boolean): void {
    const { marker } = this.code as { marker: string };
    const closing = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line)?.[1];
    if (!marker && isEnded && FENCE.test(line)) this.leaveBareCode(line);
    if (!marker || !closing?.startsWith(marker)) return;
    this.removeLast(line.length + (isEnded ? 1 : 0));
    this.closeCode();
  }

  // A fence ends code that had none.
  private leaveBareCode(line: string): void {
    const length = line.length + 1;
    this.removeLast(length);
    this.closeCode();
    this.blockAt -= length;
    this.block = `${line}\n`;
    this.textLine(line);
  }

  private textLine(line: string): void {
    if (this.isBareCode(line)) return;
    const length = line.length + 1;
    const before = this.block.length - length;
    const fence = FENCE.exec(line);
    if (fence && !(/^\s/.test(line) && LIST.test(this.block))) {
      this.closeBlock(before);
      this.blockAt += length;
      this.block = "";
      this.openCode(fence[1] as string, fence[2] as string);
    } else if (!line.trim()) {
      this.afterBlank = true;
    } else if (this.afterBlank && !/^\s/.test(line) && !(LIST.test(line) && LIST.test(this.block))) {
      this.closeBlock(before);
    } else if (this.block.length > LONG) {
      this.closeBlock(this.block.length);
    } else {
      this.afterBlank = false;
    }
  }

  // The first `length` characters of the open block are a block; the rest begins the next.
  private closeBlock(length: number): void {
    const source = this.block.slice(0, length);
    if (source.trim()) this.render(source);
    else this.discard();
    this.shown = null;
    this.block = this.block.slice(length);
    this.blockAt += length;
    this.afterBlank = false;
  }

  // What was shown of a line that has become the fence of code.
  private discard(): void {
    if (!this.shown) return;
    this.shown.drop();
    this.shown.element.remove();
    this.blocks.splice(this.blocks.indexOf(this.shown), 1);
  }

  private opened(element: HTMLElement): Painted {
    this.host.append(element);
    const made = new Painted(element, this.trail, this.part);
    this.blocks.push(made);
    this.shown = made;
    return made;
  }

  private render(source: string): void {
    const shown = this.shown ?? this.opened(document.createElement("div"));
    const { nodes, segments, colours } = rendered(source, this.blockAt);
    shown.element.className = "block";
    shown.element.replaceChildren(nodes);
    shown.segments = segments;
    shown.colours = colours;
    shown.repaint();
  }

  // The open block as it stands.
  private show(): void {
    if (!this.isMarkdown || this.code || !this.block.trim()) return;
    if (this.block.length <= SHORT) {
      this.render(this.block);
      return;
    }
    const shown = this.shown ?? this.opened(document.createElement("div"));
    const last = shown.element.lastChild;
    const isRaw = shown.element.className === "block raw" && last instanceof Text;
    if (!isRaw) {
      shown.element.className = "block raw";
      shown.element.replaceChildren(document.createTextNode(""));
      shown.segments = [];
      shown.colours = [];
      shown.repaint();
    }
    const node = shown.element.lastChild as Text;
    const offset = node.length;
    node.appendData(this.block.slice(offset));
    shown.extend({ at: this.blockAt + offset, node, offset, length: this.block.length - offset });
  }

  private openCode(marker: string, info: string): void {
    const block = code(info);
    this.host.append(block.element);
    this.code = { marker, block, text: "" };
    this.shown = null;
    this.block = "";
  }

  // Plain text: to the last piece, which ends with a line, so that only little is laid out anew.
  private append(text: string): void {
    const into = this.code ? this.code.block.body : this.host;
    let shown = this.shown;
    if (!shown || (this.block.length > PIECE && this.block.endsWith("\n"))) {
      const piece = document.createElement("span");
      piece.className = "piece";
      piece.append(document.createTextNode(""));
      into.append(piece);
      shown = this.shown = new Painted(piece, this.trail, this.part);
      this.blocks.push(shown);
      this.block = "";
    }
    const node = shown.element.firstChild as Text;
    const offset = node.length;
    node.appendData(text);
    shown.extend({ at: this.blockAt, node, offset, length: text.length });
    this.block += text;
    this.blockAt += text.length;
    if (this.code) this.code.text += text;
  }

  // The line that turned out to close the code.
  private removeLast(length: number): void {
    const open = this.code as { text: string };
    open.text = open.text.slice(0, -length);
    const node = this.shown?.element.firstChild as Text | undefined;
    if (!node || !this.shown) return;
    node.deleteData(Math.max(0, node.length - length), length);
    const kept = node.length;
    this.shown.segments = this.shown.segments
      .filter((one) => one.offset < kept)
      .map((one) => ({ ...one, length: Math.min(one.length, kept - one.offset) }));
    this.shown.repaint();
  }

  private closeCode(): void {
    const { block, text } = this.code as { block: CodeBlock; text: string };
    const own = new Map(this.blocks.map((one) => [one.element.firstChild, one]));
    const changed = new Set<Painted>();
    for (const colour of block.close(text)) {
      const piece = own.get(colour.node);
      piece?.colours.push(colour);
      if (piece) changed.add(piece);
    }
    for (const piece of changed) piece.repaint();
    this.code = null;
    this.shown = null;
    this.block = "";
    this.afterBlank = false;
  }

  private end(): void {
    const { line } = this;
    if (this.code) {
      if (line) this.codeLine(line, false);
      if (this.code) this.closeCode();
    } else if (this.isMarkdown && this.block) {
      if (!line || !this.isBareCode(line)) this.closeBlock(this.block.length);
      else this.closeCode();
    }
    this.line = "";
  }

  drop(): void {
    for (const block of this.blocks) block.drop();
  }
}
