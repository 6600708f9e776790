// What is inside a block: strings, and {type, children | text | href} with type strong, em, strike, code, link, break.

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /^(https?:\/\/|mailto:)/i;
const MAX_ADDRESS = 2000;
const TITLE_AND_END = /(?:\s{1,9}(?:"[^"\n]{0,200}"|'[^'\n]{0,200}'))?\)/y;
const BARE = /https?:\/\/[^\s<>"'`]+/iy;

/** One pass with a stack of what is open. A mark that finds no partner is text. */
export function parseInline(text) {
  const out = [];
  const open = []; // {mark, at}: where in `out` the opening mark stands, as text
  let buffer = "";
  const flush = () => {
    if (buffer) out.push(buffer);
    buffer = "";
  };
  const runs = backtickRuns(text);
  const lastLink = text.lastIndexOf("](");
  for (let i = 0; i < text.length; ) {
    const c = text[i];
    if (c === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      buffer += text[i + 1];
      i += 2;
    } else if (c === "`") {
      const length = runLength(text, i);
      const end = runs.next(length, i + length);
      if (end < 0) buffer += "`".repeat(length);
      else {
        flush();
        const code = text.slice(i + length, end).replace(/\n/g, " ");
        out.push({ type: "code", text: /^ .*\S.* $/.test(code) ? code.slice(1, -1) : code });
      }
      i = end < 0 ? i + length : end + length;
    } else if (c === "*" || c === "_" || c === "~") {
      const length = Math.min(runLength(text, i), c === "~" ? 2 : 3);
      const mark = c.repeat(length);
      const before = text[i - 1] ?? " ";
      const after = text[i + length] ?? " ";
      const inWord = c === "_" && WORD.test(before) && WORD.test(after);
      const closes = before.trim() !== "" && !inWord && (c !== "~" || length === 2);
      const opens = after.trim() !== "" && !inWord && (c !== "~" || length === 2);
      flush();
      const at = closes ? findOpen(open, mark) : -1;
      if (at >= 0) {
        const [opener] = open.splice(at);
        const children = out.splice(opener.at).slice(1);
        out.push(emphasis(mark, children));
      } else {
        if (opens) open.push({ mark, at: out.length });
        out.push(mark);
      }
      i += length;
    } else if (c === "[" || (c === "!" && text[i + 1] === "[")) {
      const link = i < lastLink ? linkAt(text, c === "!" ? i + 1 : i) : null;
      if (link) {
        flush();
        out.push({ type: "link", href: link.href, children: link.label ? parseInline(link.label) : [link.href] });
        i = link.end;
      } else {
        buffer += c;
        i += 1;
      }
    } else if (c === "<") {
      const inside = text.slice(i + 1, i + MAX_ADDRESS).split(">", 1)[0];
      const end = i + 1 + inside.length;
      if (text[end] === ">" && ADDRESS.test(inside) && !/\s/.test(inside)) {
        flush();
        out.push({ type: "link", href: inside, children: [inside.replace(/^mailto:/i, "")] });
        i = end + 1;
      } else {
        buffer += c;
        i += 1;
      }
    } else if (c === "h" && !WORD.test(text[i - 1] ?? " ") && bareAt(text, i)) {
      const href = bareAt(text, i);
      flush();
      out.push({ type: "link", href, children: [href] });
      i += href.length;
    } else if (c === "\n") {
      const backslash = buffer.endsWith("\\");
      const hard = backslash || buffer.endsWith("  ");
      buffer = backslash ? buffer.slice(0, -1) : buffer.trimEnd();
      flush();
      out.push(hard ? { type: "break" } : "\n");
      i += 1;
    } else {
      buffer += c;
      i += 1;
    }
  }
  flush();
  return out;
}

function emphasis(mark, children) {
  if (mark[0] === "~") return { type: "strike", children };
  if (mark.length === 1) return { type: "em", children };
  const strong = { type: "strong", children };
  return mark.length === 2 ? strong : { type: "em", children: [strong] };
}

const MAX_OPEN = 64; // how far back a partner is looked for

function findOpen(open, mark) {
  for (let i = open.length - 1; i >= Math.max(0, open.length - MAX_OPEN); i--) if (open[i].mark === mark) return i;
  return -1;
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Where the next run of exactly that many backticks begins; each run is looked at once for each length. */
function backtickRuns(text) {
  const starts = new Map();
  for (const match of text.matchAll(/`+/g)) {
    const list = starts.get(match[0].length) ?? [];
    list.push(match.index);
    starts.set(match[0].length, list);
  }
  const cursor = new Map();
  return {
    next(length, from) {
      const list = starts.get(length) ?? [];
      let i = cursor.get(length) ?? 0;
      while (i < list.length && list[i] < from) i += 1;
      cursor.set(length, i);
      return i < list.length ? list[i] : -1;
    },
  };
}

const MAX_LABEL = 300;

/** [label](address "title"). Anything but http, https and mailto is not a link. */
function linkAt(text, at) {
  let depth = 0;
  for (let i = at; i < Math.min(text.length, at + MAX_LABEL); i++) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === "[") depth += 1;
    else if (text[i] === "]" && --depth === 0) {
      if (text[i + 1] !== "(") return null;
      const address = addressAt(text, i + 2);
      return address && { label: text.slice(at + 1, i), ...address };
    }
  }
  return null;
}

/** From behind the opening parenthesis; parentheses within an address come in pairs. */
function addressAt(text, at) {
  if (!ADDRESS.test(text.slice(at, at + 8))) return null;
  let depth = 0;
  let i = at;
  while (i < text.length && i < at + MAX_ADDRESS && text[i] > " ") {
    if (text[i] === "(") depth += 1;
    if (text[i] === ")" && depth-- === 0) break;
    i += 1;
  }
  const href = text.slice(at, i);
  TITLE_AND_END.lastIndex = i;
  const end = TITLE_AND_END.exec(text);
  return end && { href, end: i + end[0].length };
}

function bareAt(text, at) {
  BARE.lastIndex = at;
  const url = BARE.exec(text)?.[0].replace(/[.,;:!?*_~]+$/, "") ?? null;
  if (!url) return null;
  return url.endsWith(")") && !url.includes("(") ? url.slice(0, -1) : url;
}
