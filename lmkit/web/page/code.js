// Colours for code: comments, strings, numbers, keywords and calls. One pass, no grammar of any language.

const MAX_PAINTED = 60_000; // characters; longer code stays plain

const words = (text) => new Set(text.split(" "));
const C_LIKE = words(
  "abstract as async await auto bool break case catch char class const constexpr continue default defer delete do double " +
    "else enum export extends extern false final finally float fn for from func function go goto if impl implements import " +
    "in instanceof int interface let long loop match mod mut namespace new nil null nullptr of operator override package " +
    "private protected pub public return self short signed sizeof static string struct super switch template this throw " +
    "trait true try type typedef typename typeof undefined unsafe unsigned use using var virtual void volatile where while " +
    "yield",
);
const PYTHON = words(
  "and as assert async await break case class continue def del elif else except False finally for from global if import " +
    "in is lambda match None nonlocal not or pass raise return self True try while with yield",
);
const SHELL = words("case do done elif else esac export fi for function if in local return set then until while");
const SQL = words(
  "add all alter and as asc between by case create cross default delete desc distinct drop else end exists from full " +
    "group having in index inner insert into is join key left like limit not null offset on or order outer primary " +
    "references right select set table then union unique update values view when where with",
);
const DATA = words("true false null yes no");

const HASH = String.raw`#.*`;
const SLASHES = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const TICKED = "`(?:[^`\\\\]|\\\\[^])*`?";

const KINDS = [
  { names: "python py python3 pycon toml", keywords: PYTHON, comment: HASH, string: `${TRIPLE}|${QUOTED}` },
  { names: "bash sh shell zsh console makefile dockerfile", keywords: SHELL, comment: HASH, string: QUOTED },
  { names: "yaml yml ruby rb r", keywords: words([...PYTHON, ...DATA, "end", "do", "require"].join(" ")), comment: HASH, string: QUOTED },
  { names: "sql", keywords: SQL, comment: String.raw`--.*|\/\*[^]*?(?:\*\/|$)`, string: QUOTED, ignoresCase: true },
  { names: "json json5 jsonl", keywords: DATA, comment: SLASHES, string: QUOTED },
  { names: "html xml svg", keywords: new Set(), comment: String.raw`<!--[^]*?(?:-->|$)`, string: QUOTED },
  { names: "css scss", keywords: new Set(), comment: SLASHES, string: QUOTED },
  {
    names: "javascript js mjs jsx typescript ts tsx c h cpp c++ cc cuda java kotlin swift go rust rs csharp cs php scala dart zig",
    keywords: C_LIKE, comment: SLASHES, string: `${QUOTED}|${TICKED}`,
  },
];

const BY_NAME = new Map();
for (const kind of KINDS) {
  const parts = [`(?<comment>${kind.comment})`, `(?<string>${kind.string})`, String.raw`(?<number>\b\d[\w.]*)`, String.raw`(?<word>[\p{L}_]\w*)(?<call>\()?`];
  kind.pattern = new RegExp(parts.join("|"), "gu");
  for (const name of kind.names.split(" ")) BY_NAME.set(name, kind);
}

/** The text in spans with the classes c-comment, c-string, c-number, c-keyword and c-call. */
export function paint(text, language) {
  const made = document.createDocumentFragment();
  const kind = BY_NAME.get(language.toLowerCase());
  if (!kind || text.length > MAX_PAINTED) {
    made.append(text);
    return made;
  }
  let end = 0;
  for (const found of text.matchAll(kind.pattern)) {
    const { comment, string, number, word, call } = found.groups;
    const isKeyword = word && kind.keywords.has(kind.ignoresCase ? word.toLowerCase() : word);
    const name = comment ? "comment" : string ? "string" : number ? "number" : isKeyword ? "keyword" : call ? "call" : "";
    if (!name) continue;
    const shown = document.createElement("span");
    shown.className = `c-${name}`;
    shown.textContent = word ?? found[0];
    made.append(text.slice(end, found.index), shown);
    end = found.index + shown.textContent.length;
  }
  made.append(text.slice(end));
  return made;
}
