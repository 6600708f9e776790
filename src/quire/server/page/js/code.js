// Programs in colour: comments, strings, numbers and words of the language, and nothing cleverer. One pass, no looking back.

const words = (text) => new Set(text.split(" "));

const PYTHON = words("and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self");
const C = words(
  "abstract as async auto await bool boolean break byte case catch char class const constexpr continue default defer delete do double else enum export extends extern final finally float fn for from func function go goto if impl implements import in instanceof int interface let long loop match mod mut namespace new nil null nullptr operator override package private protected pub public range return self short signed sizeof static string struct super switch template this throw throws trait true false try type typedef typename typeof undefined union unsafe unsigned use using val var virtual void volatile when where while yield",
);
const SHELL = words("case do done elif else esac exit export fi for function if in local return set source then until while echo cd");
const SQL = words(
  "add all alter and as asc between by case create delete desc distinct drop else end exists from full group having in index inner insert into is join key left like limit not null on or order outer primary references right select set table then union unique update values view when where with",
);
const DATA = words("true false null yes no on off");
const RUBY = words("alias and begin break case class def do else elsif end ensure false for if in module next nil not or require rescue return self super then true unless until when while yield function local repeat");

const NUMBER = String.raw`\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\b`;
const HASH = String.raw`#[^\n]*`;
const SPACED_HASH = String.raw`(?<!\S)#[^\n]*`; // a # within a word does not start a comment
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const DASHES = String.raw`--[^\n]*`;
const DOUBLE = String.raw`"(?:[^"\\\n]|\\[^])*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\[^])*'?`;
const BACKTICK = "`(?:[^`\\\\]|\\\\[^])*`?";
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;

const family = (comment, strings, keywords, fold = false) => ({
  keywords,
  fold, // capital letters do not matter
  pattern: new RegExp(`(?<comment>${comment})|(?<string>${strings.join("|")})|(?<number>${NUMBER})|(?<word>[\\p{L}_$][\\p{L}\\p{N}_$]*)`, "gu"),
});

const python = family(HASH, [TRIPLE, DOUBLE, SINGLE], PYTHON);
const javascript = family(SLASHES, [DOUBLE, SINGLE, BACKTICK], C);
const c = family(SLASHES, [DOUBLE, SINGLE], C);
const rust = family(SLASHES, [DOUBLE], C); // 'a is a lifetime
const shell = family(SPACED_HASH, [DOUBLE, SINGLE], SHELL);
const data = family(SPACED_HASH, [DOUBLE, SINGLE], DATA);
const sql = family(DASHES, [DOUBLE, SINGLE], SQL, true);
const ruby = family(HASH, [DOUBLE, SINGLE], RUBY);
const lua = family(DASHES, [DOUBLE, SINGLE], RUBY);

const FAMILIES = {
  python, py: python, python3: python,
  javascript, js: javascript, jsx: javascript, mjs: javascript, typescript: javascript, ts: javascript, tsx: javascript, go: javascript, golang: javascript,
  c, h: c, cpp: c, "c++": c, cc: c, hpp: c, cuda: c, java: c, kotlin: c, scala: c, swift: c, csharp: c, cs: c, "c#": c, php: c, dart: c, css: c, scss: c,
  rust, rs: rust,
  bash: shell, sh: shell, shell, zsh: shell, dockerfile: shell, makefile: shell, make: shell,
  json: data, yaml: data, yml: data, toml: data, ini: data,
  sql, ruby, rb: ruby, lua,
};

const LONGEST = 50_000; // letters; more stays plain

/** [{kind, text}] with kind comment, string, number, keyword or "": put together, the same text. */
export function tokens(text, language) {
  const { pattern, keywords, fold } = FAMILIES[language.toLowerCase()] ?? {};
  if (!pattern || text.length > LONGEST) return [{ kind: "", text }];
  const parts = [];
  let plain = 0;
  for (const match of text.matchAll(pattern)) {
    const { comment, string, number, word } = match.groups;
    const known = word !== undefined && keywords.has(fold ? word.toLowerCase() : word);
    const kind = comment !== undefined ? "comment" : string !== undefined ? "string" : number !== undefined ? "number" : known ? "keyword" : "";
    if (!kind) continue;
    if (match.index > plain) parts.push({ kind: "", text: text.slice(plain, match.index) });
    parts.push({ kind, text: match[0] });
    plain = match.index + match[0].length;
  }
  if (plain < text.length) parts.push({ kind: "", text: text.slice(plain) });
  return parts;
}
