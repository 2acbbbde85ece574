// Syntax in code: highlight.js finds it, and its answer is read for places and kinds alone.

import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const KNOWN = { bash, cpp, css, diff, go, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(KNOWN)) hljs.registerLanguage(name, language);
hljs.registerAliases(["js", "javascript", "jsx", "mjs"], { languageName: "typescript" });
hljs.registerAliases(["c", "h"], { languageName: "cpp" });
const MOST = 20_000; // characters; more would hold up the page

// The kinds that have a colour of their own in style.css.
const KINDS: Record<string, string> = {
  keyword: "keyword",
  built_in: "keyword",
  type: "type",
  literal: "number",
  number: "number",
  string: "string",
  regexp: "string",
  comment: "comment",
  doctag: "comment",
  meta: "comment",
  title: "title",
  section: "title",
  name: "title",
  "selector-tag": "title",
  attr: "type",
  attribute: "type",
  addition: "string",
  deletion: "deletion",
};
const PART = /<span class="([^"]*)">|<\/span>|&(amp|lt|gt|quot|#x27);|[^<&]+/g;

export interface Stretch {
  name: string;
  from: number;
  to: number;
}

export function syntaxOf(code: string, language: string): Stretch[] {
  if (code.length > MOST || !hljs.getLanguage(language)) return [];
  const answer = hljs.highlight(code, { language, ignoreIllegals: true }).value;
  const found: Stretch[] = [];
  const open: string[] = [];
  let at = 0;
  for (const [part, kinds, entity] of answer.matchAll(PART)) {
    if (kinds !== undefined) {
      const kind = /hljs-([\w-]+)/.exec(kinds)?.[1] ?? "";
      open.push(KINDS[kind] ?? open.at(-1) ?? "");
    } else if (part === "</span>") {
      open.pop();
    } else {
      const length = entity ? 1 : part.length;
      const name = open.at(-1);
      if (name) found.push({ name: `code-${name}`, from: at, to: at + length });
      at += length;
    }
  }
  return found;
}
