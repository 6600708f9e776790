// Markdown becomes a tree of blocks: {type, raw, ...} with type heading, paragraph, code, quote, list, table, rule.
// Model text is data here: HTML in it stays text, and a hostile one takes no longer than a kind one.

import { parseInline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(\s+)(?=\S)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_ROW = 2000; // letters of a line that may be a row of a table
const MAX_DEPTH = 12; // of quotes and lists; deeper ones are paragraphs

export function parse(text, depth = 0) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = blockAt(lines, at, depth);
    block.raw = lines.slice(at, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  let match;
  if (isFence(line)) return codeAt(lines, at);
  if ((match = HEADING.exec(line))) {
    const title = withoutHashes(line.slice(match[0].length).trim());
    return [{ type: "heading", level: match[1].length, children: parseInline(title) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return quoteAt(lines, at, depth);
    if (ITEM.test(line)) return listAt(lines, at, depth);
  }
  if (isRow(line) && at + 1 < lines.length && isRow(`|${lines[at + 1]}`) && DIVIDER.test(lines[at + 1])) {
    const head = cells(line);
    if (head.length === cells(lines[at + 1]).length) return tableAt(lines, at, head);
  }
  return paragraphAt(lines, at, depth);
}

function isFence(line) {
  const match = FENCE.exec(line);
  return match !== null && (match[1][0] === "~" || !match[2].includes("`"));
}

const isRow = (line) => line.includes("|") && line.length < MAX_ROW;

/** A heading may close with as many # as it likes. */
function withoutHashes(title) {
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end === 0 || title[end - 1] === " " ? title.slice(0, end).trimEnd() : title;
}

/** A fence that is never closed runs to the end: that is how it looks while it is being written. */
function codeAt(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const language = info.trim().split(/\s/)[0];
  const body = [];
  for (let i = at + 1; i < lines.length; i++) {
    const end = lines[i].trim();
    if (end.length >= fence.length && end === fence[0].repeat(end.length)) {
      return [{ type: "code", language, text: body.join("\n") }, i + 1];
    }
    body.push(lines[i]);
  }
  return [{ type: "code", language, text: body.join("\n"), open: true }, lines.length];
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", children: parse(inside.join("\n"), depth + 1) }, end];
}

function listAt(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = first[2].length > 1;
  const items = [];
  let i = at;
  let loose = false; // a blank line stands between items, or within one
  let gap = false;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    const same = match && match[1].length <= first[1].length + 1 && match[2].length > 1 === ordered;
    if (!same || RULE.test(lines[i])) break;
    loose ||= gap;
    gap = false;
    const indent = match[1].length + match[2].length + Math.min(match[3].length, 4);
    const inside = [lines[i].slice(match[0].length)];
    i += 1;
    while (i < lines.length) {
      const blank = !lines[i].trim();
      const within = /^ */.exec(lines[i])[0].length >= Math.min(indent, match[1].length + 2);
      if (blank) {
        const next = lines[i + 1];
        if (next === undefined || !next.trim() || !(next.startsWith("  ") || ITEM.test(next))) break;
        gap = true;
        inside.push("");
      } else if (within) {
        loose ||= gap;
        gap = false;
        inside.push(lines[i].slice(Math.min(indent, /^ */.exec(lines[i])[0].length)));
      } else if (ITEM.test(lines[i]) || startsBlock(lines[i]) || !lines[i - 1].trim()) {
        break;
      } else {
        inside.push(lines[i]); // a lazy line goes on with the paragraph
      }
      i += 1;
    }
    items.push(parse(inside.join("\n"), depth + 1));
  }
  const start = ordered ? Number.parseInt(first[2], 10) : undefined;
  return [{ type: "list", ordered, start, loose, items }, i];
}

function tableAt(lines, at, head) {
  const align = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start",
  );
  const rows = [];
  let end = at + 2;
  while (end < lines.length && isRow(lines[end])) {
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => parseInline(row[column] ?? "")));
    end += 1;
  }
  return [{ type: "table", align, head: head.map((cell) => parseInline(cell)), rows }, end];
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

const startsBlock = (line) => isFence(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines[end])) {
    if (depth < MAX_DEPTH && ITEM.test(lines[end])) break;
    end += 1;
  }
  return [{ type: "paragraph", children: parseInline(lines.slice(at, end).join("\n")) }, end];
}
