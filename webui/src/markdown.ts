// Markdown as elements. No markup is ever parsed: marked finds the structure, and only what is listed here is made of
// it, so nothing of a model's text can run or load. HTML in it is shown as the text that it is.

import { Lexer, type Token, type Tokens } from "marked";
import { code } from "./code_block";
import type { Colour, Segment } from "./paint";

export interface Rendered {
  nodes: DocumentFragment;
  segments: Segment[];
  colours: Colour[];
}

const ENTITY = /&(?:amp|lt|gt|quot|nbsp|#39);/;
const ENTITIES: Record<string, string> = {
  "&amp;": "&",
  "&lt;": "<",
  "&gt;": ">",
  "&quot;": '"',
  "&nbsp;": "\u00a0",
  "&#39;": "'",
};
const FAR = 400; // characters of markup between two texts at most; more means that the search has gone astray
const WRAPPERS: Record<string, keyof HTMLElementTagNameMap> = { strong: "strong", em: "em", del: "del" };

// `source` is the reply's text from `at` on.
export function rendered(source: string, at: number): Rendered {
  try {
    return made(source, at, (maker, into) => maker.blocks(Lexer.lex(source, { gfm: true }), into));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    // Quotes or lists so deep that the stack does not hold them, as of a model that only repeats `>`.
    return made(source, at, (maker, into) => maker.plain(into));
  }
}

function made(source: string, at: number, make: (maker: Maker, into: Node) => void): Rendered {
  const maker = new Maker(source, at);
  const nodes = document.createDocumentFragment();
  make(maker, nodes);
  return { nodes, segments: maker.segments, colours: maker.colours };
}

class Maker {
  segments: Segment[] = [];
  colours: Colour[] = [];
  private read = 0; // characters of the source that are behind

  constructor(
    private readonly source: string,
    private readonly at: number,
  ) {}

  blocks(tokens: Token[], into: Node): void {
    for (const token of tokens) this.within(token, () => this.block(token as Tokens.Generic, into));
  }

  // The source as it stands.
  plain(into: Node): void {
    this.leaf(this.source, child(into, "p"));
  }

  // Makes a token; afterwards everything of it counts as read.
  private within(token: Token, make: () => void): void {
    const start = this.source.indexOf(token.raw, this.read);
    const isHere = start >= 0 && start - this.read < FAR;
    if (isHere) this.read = start;
    make();
    if (isHere) this.read = Math.max(this.read, start + token.raw.length);
  }

  private block(token: Tokens.Generic, into: Node): void {
    const { type } = token;
    if (type === "heading") this.inline(token.tokens, child(into, `h${Math.min(6, token.depth + 2)}`));
    else if (type === "paragraph") this.inline(token.tokens, child(into, "p"));
    else if (type === "blockquote") this.blocks(token.tokens ?? [], child(into, "blockquote"));
    else if (type === "code") this.code(token as Tokens.Code, into);
    else if (type === "list") this.list(token as Tokens.List, into);
    else if (type === "table") this.table(token as Tokens.Table, into);
    else if (type === "hr") child(into, "hr");
    else if (type === "text" && token.tokens) this.inline(token.tokens, into);
    else if (type === "html") this.leaf(token.raw.trimEnd(), child(into, "p"));
    else if (type !== "space" && type !== "def" && type !== "checkbox") this.leaf(token.raw, into);
  }

  private code(token: Tokens.Code, into: Node): void {
    const { element, body, close } = code(token.lang ?? "");
    into.appendChild(element);
    body.dataset.whole = "";
    this.leaf(token.text, body);
    this.colours.push(...close(token.text));
  }

  private list(token: Tokens.List, into: Node): void {
    const list = child(into, token.ordered ? "ol" : "ul");
    list.dir = "auto"; // its marks stand where its lines begin
    if (token.ordered && token.start !== 1) (list as HTMLOListElement).start = Number(token.start);
    for (const item of token.items) {
      this.within(item, () => {
        const line = child(list, "li");
        if (item.task) {
          const box = child(line, "input") as HTMLInputElement;
          box.type = "checkbox";
          box.disabled = true;
          box.checked = item.checked ?? false;
          box.ariaLabel = item.checked ? "done" : "open";
        }
        this.blocks(item.tokens, line);
      });
    }
  }

  private table(token: Tokens.Table, into: Node): void {
    const frame = child(into, "div");
    frame.className = "table";
    frame.tabIndex = 0;
    frame.role = "region";
    frame.ariaLabel = "Table";
    const table = child(frame, "table");
    const row = (cells: Tokens.TableCell[], name: "th" | "td", body: Node) => {
      const line = child(body, "tr");
      for (const cell of cells) {
        const made = child(line, name);
        if (cell.align) made.style.textAlign = cell.align;
        this.inline(cell.tokens, made);
      }
    };
    row(token.header, "th", child(table, "thead"));
    const body = child(table, "tbody");
    for (const cells of token.rows) row(cells, "td", body);
  }

  private inline(tokens: Token[] | undefined, into: Node): void {
    for (const token of tokens ?? []) this.within(token, () => this.span(token as Tokens.Generic, into));
  }

  private span(token: Tokens.Generic, into: Node): void {
    const { type } = token;
    const wrapper = WRAPPERS[type];
    if (wrapper) this.inline(token.tokens, child(into, wrapper));
    else if (type === "codespan") this.leaf(token.text, child(into, "code"));
    else if (type === "br") child(into, "br");
    else if (type === "link") this.link(token as Tokens.Link, into);
    else if (type === "image") this.image(token as Tokens.Image, into);
    else if (type === "html" && /^<br\s*\/?>$/i.test(token.raw)) child(into, "br");
    else if (type === "text" && token.tokens) this.inline(token.tokens, into);
    else if (type === "text") this.words(token.text, into);
    else if (type === "escape") this.leaf(token.text, into);
    else if (type !== "checkbox") this.leaf(token.raw, into);
  }

  private link(token: Tokens.Link, into: Node): void {
    this.inline(token.tokens, anchor(token.href, into) ?? into);
  }

  // An image is not loaded, as that would tell its server that it is looked at: it is a link.
  private image(token: Tokens.Image, into: Node): void {
    const link = anchor(token.href, into) ?? child(into, "span");
    link.classList.add("image");
    this.leaf(token.text || "image", link);
  }

  // Text in which entities stand for characters.
  private words(text: string, into: Node): void {
    let rest = text;
    for (let found = ENTITY.exec(rest); found; found = ENTITY.exec(rest)) {
      if (found.index) this.leaf(rest.slice(0, found.index), into);
      into.appendChild(document.createTextNode(ENTITIES[found[0]] as string));
      rest = rest.slice(found.index + found[0].length);
    }
    if (rest) this.leaf(rest, into);
  }

  // A text node, and for each of its lines where it stands in the source: lists and quotes indent them.
  private leaf(text: string, into: Node): void {
    const node = document.createTextNode(text);
    into.appendChild(node);
    let offset = 0;
    for (const line of text.split("\n")) {
      const found = this.source.indexOf(line, this.read);
      if (found >= 0 && found - this.read < FAR) {
        const length = Math.min(line.length + 1, text.length - offset);
        if (length) this.segments.push({ at: this.at + found, node, offset, length });
        this.read = found + line.length;
      }
      offset += line.length + 1;
    }
  }
}

function child(into: Node, name: string): HTMLElement {
  return into.appendChild(document.createElement(name));
}

function anchor(href: string, into: Node): HTMLAnchorElement | null {
  if (!/^(?:https?:\/\/|mailto:)/i.test(href)) return null;
  const made = child(into, "a") as HTMLAnchorElement;
  made.href = href;
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  made.title = href;
  return made;
}
