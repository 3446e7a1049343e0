// Markdown as DOM nodes. Text of a model only ever becomes text nodes and the address of a link, which is checked:
// there is no HTML. Images are never fetched, because an address can carry away what was said.
//
// The time is linear in the text, whatever it is: see `Inline`. Depths are bounded, so no text makes a deep tree.

import { paint } from "./code.js";

const MAX_DEPTH = 10; // of lists and quotes in each other
const MAX_OPEN = 48; // marks and brackets that wait for their second half
const MAX_RUN = 6; // marks in a row
const MAX_ADDRESS = 2048;

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Show `text` in `target`. Blocks that are the same as before keep their nodes. */
export function show(target, text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const parts = [...split(lines)].map((part) => ({ ...part, source: lines.slice(part.start, part.end).join("\n") }));
  const before = target.shown ?? [];
  let same = 0;
  while (same < before.length && same < parts.length && before[same] === parts[same].kind + parts[same].source) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const part of parts.slice(same)) target.append(block(part.kind, part.source.split("\n"), 0));
  target.shown = parts.map((part) => part.kind + part.source);
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])([ \t]+|$)/;

const isBlank = (line) => line.trim() === "";
const isRule = (line) => /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/[ \t]/g, "")) && !/^ {4}/.test(line);
const isRuled = (line = "") => /^[ \t|:-]+$/.test(line) && line.includes("-") && line.includes("|");
const isTable = (lines, i) => lines[i].includes("|") && isRuled(lines[i + 1]);

/** The mark that opens a block of code, and its language; null if the line opens none. */
function fence(line) {
  const mark = FENCE.exec(line)?.[1];
  const rest = mark && line.trim().slice(mark.length).trim();
  return mark && !(mark[0] === "`" && rest.includes("`")) ? { mark, language: rest.split(/\s/, 1)[0] } : null;
}

/** The kind of block that begins at line i; a paragraph if no other does. */
function kindAt(lines, i) {
  const line = lines[i];
  if (fence(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (isRule(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return isTable(lines, i) ? "table" : "paragraph";
}

/** The blocks of some lines: {kind, start, end}. */
function* split(lines) {
  let i = 0;
  while (i < lines.length) {
    if (isBlank(lines[i])) {
      i++;
      continue;
    }
    const kind = kindAt(lines, i);
    const end = ENDS[kind](lines, i);
    yield { kind, start: i, end };
    i = end;
  }
}

const ENDS = {
  heading: (lines, i) => i + 1,
  rule: (lines, i) => i + 1,
  fence(lines, i) {
    const { mark } = fence(lines[i]);
    for (let end = i + 1; end < lines.length; end++) if (closes(lines[end], mark)) return end + 1;
    return lines.length;
  },
  quote(lines, i) {
    while (i < lines.length && QUOTE.test(lines[i])) i++;
    return i;
  },
  table(lines, i) {
    while (i < lines.length && !isBlank(lines[i]) && lines[i].includes("|")) i++;
    return i;
  },
  paragraph(lines, i) {
    do i++;
    while (i < lines.length && !isBlank(lines[i]) && kindAt(lines, i) === "paragraph");
    return i;
  },
  list(lines, i) {
    const ordered = /\d/.test(ITEM.exec(lines[i])[2]);
    let end = i + 1;
    for (let at = end; at < lines.length; at++) {
      const line = lines[at];
      if (isBlank(line)) continue;
      const item = ITEM.exec(line);
      const isNext = item && !isRule(line) && (item[1].length >= 2 || /\d/.test(item[2]) === ordered);
      const isInside = /^(?: {2}|\t)/.test(line) || (at === end && kindAt(lines, at) === "paragraph");
      if (!isNext && !isInside) break;
      end = at + 1;
    }
    return end;
  },
};

function closes(line, mark) {
  const text = line.trim();
  return text.length >= mark.length && text === mark[0].repeat(text.length) && !/^ {4}/.test(line);
}

function blocks(lines, depth) {
  const made = document.createDocumentFragment();
  for (const { kind, start, end } of split(lines)) made.append(block(kind, lines.slice(start, end), depth));
  return made;
}

function block(kind, lines, depth) {
  if (depth > MAX_DEPTH) return element("p", {}, lines.join("\n"));
  return BLOCKS[kind](lines, depth);
}

const BLOCKS = {
  rule: () => element("hr"),
  paragraph: (lines) => element("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
  heading([line]) {
    const [mark, { length: level }] = HEADING.exec(line);
    // The page has headings of its own, so those of an answer begin with the third level.
    return element(`h${Math.min(level + 2, 6)}`, {}, inline(line.slice(mark.length).trim().replace(/(?:^|[ \t])#+$/, "")));
  },
  fence(lines) {
    const { mark, language } = fence(lines[0]);
    const isClosed = lines.length > 1 && closes(lines.at(-1), mark);
    return codeBlock(lines.slice(1, isClosed ? -1 : undefined).join("\n"), language);
  },
  quote: (lines, depth) => element("blockquote", {}, blocks(lines.map((line) => line.replace(QUOTE, "")), depth + 1)),
  table(lines) {
    const aligned = cells(lines[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
    const row = (line, tag) =>
      element("tr", {}, ...cells(line).slice(0, aligned.length).map((cell, i) =>
        element(tag, aligned[i] ? { class: aligned[i] } : {}, inline(cell))));
    const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
    const table = element("table", {}, element("thead", {}, row(lines[0], "th")), body);
    return element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, table);
  },
  list(lines, depth) {
    const items = [];
    let width = 0;
    for (const line of lines) {
      const item = ITEM.exec(line);
      const indent = line.length - line.trimStart().length;
      if (item && (items.length === 0 || indent < Math.min(width, 2))) {
        width = item[1].length + item[2].length + 1;
        items.push([line.slice(item[0].length)]);
      } else {
        items.at(-1).push(line.slice(Math.min(indent, width)));
      }
    }
    const number = parseInt(ITEM.exec(lines[0])[2], 10);
    const isLoose = items.some((item) => item.some((line, i) => isBlank(line) && i < item.length - 1 && !isBlank(item[i + 1]) && !ITEM.test(item[i + 1])));
    const made = items.map((item) => listItem(item, depth, isLoose));
    return Number.isNaN(number)
      ? element("ul", {}, ...made)
      : element("ol", number === 1 ? {} : { start: String(number) }, ...made);
  },
};

function listItem(lines, depth, isLoose) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const body = blocks(lines, depth + 1);
  if (!isLoose) for (const p of [...body.children]) if (p.tagName === "P") p.replaceWith(...p.childNodes);
  if (!task) return element("li", {}, body);
  const box = element("span", { class: "task", role: "img", "aria-label": task[1] === " " ? "open" : "done" });
  box.textContent = task[1] === " " ? "☐" : "☑";
  return element("li", { class: "tasked" }, box, body);
}

/** The cells of a table's row. */
function cells(line) {
  const found = line.trim().replace(/^\|/, "").split("|");
  const joined = [];
  for (const cell of found) {
    if (joined.length && joined.at(-1).endsWith("\\")) joined.push(joined.pop().slice(0, -1) + "|" + cell);
    else joined.push(cell);
  }
  if (joined.length > 1 && isBlank(joined.at(-1))) joined.pop();
  return joined.map((cell) => cell.trim());
}

export function codeBlock(text, language) {
  const code = element("code", {}, paint(text, language));
  const copy = element("button", { type: "button", class: "plain", "data-copy": "" }, "Copy");
  const head = element("div", { class: "title" }, element("span", {}, language || "text"), copy);
  const body = element("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, code);
  return element("div", { class: "code" }, head, body);
}

/** An address that a link may have, or null. */
function safeAddress(text) {
  if (text.length > MAX_ADDRESS || !/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function link(address, ...children) {
  return element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

export function inline(text) {
  return new Inline(text).parse();
}

// Marks that may open an emphasis wait in `open`; a mark that closes takes the last one of its kind, and those after it
// stay text. A search that finds none is not made again below that point (`floor`), so each mark is passed once.
const ADDRESS = /https?:\/\/[^\s<>]{1,2048}/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048})>/y;
const SPECIAL = /[\\`*_~[\]!<h]/g;
const isSpace = (c) => c === undefined || /\s/.test(c);
const isMark = (c) => c !== undefined && /[\p{P}\p{S}]/u.test(c);
const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

class Inline {
  constructor(text) {
    this.text = text;
    this.made = []; // nodes and texts
    this.open = []; // {char, count, at}: at is its place in `made`
    this.floor = {};
    this.unclosed = new Set(); // lengths of runs of backticks that do not come again
  }

  parse() {
    const { text } = this;
    let i = 0;
    while (i < text.length) {
      SPECIAL.lastIndex = i;
      const next = SPECIAL.exec(text)?.index ?? text.length;
      if (next > i) this.made.push(text.slice(i, next));
      i = next < text.length ? this.special(next) : next;
    }
    const fragment = document.createDocumentFragment();
    fragment.append(...this.nodes(0));
    return fragment;
  }

  /** Take what begins at i; the place after it. */
  special(i) {
    const c = this.text[i];
    if (c === "\\") return this.escaped(i);
    if (c === "`") return this.code(i);
    if (c === "[" || (c === "!" && this.text[i + 1] === "[")) return this.bracket(i, c);
    if (c === "]") return this.closeBracket(i);
    if (c === "<" || c === "h") return this.address(i, c === "<" ? ANGLED : ADDRESS);
    return c === "!" ? this.plain(i, 1) : this.marks(i, c);
  }

  plain(i, length) {
    this.made.push(this.text.slice(i, i + length));
    return i + length;
  }

  escaped(i) {
    const next = this.text[i + 1];
    if (!/[!-/:-@[-`{-~]/.test(next ?? "")) return this.plain(i, 1);
    this.made.push(next);
    return i + 2;
  }

  code(i) {
    const { text } = this;
    const length = run(text, i);
    let end = this.unclosed.has(length) ? -1 : text.indexOf("`", i + length);
    while (end >= 0) {
      const found = run(text, end);
      if (found === length) {
        const inner = text.slice(i + length, end).replaceAll("\n", " ");
        const isPadded = inner.length > 2 && inner.startsWith(" ") && inner.endsWith(" ");
        this.made.push(element("code", {}, isPadded ? inner.slice(1, -1) : inner));
        return end + length;
      }
      end = text.indexOf("`", end + found);
    }
    this.unclosed.add(length);
    return this.plain(i, length);
  }

  address(i, pattern) {
    pattern.lastIndex = i;
    const found = isWord(this.text[i - 1]) ? null : pattern.exec(this.text);
    if (!found) return this.plain(i, 1);
    let shown = found[1] ?? found[0];
    if (!found[1]) {
      let end = shown.length;
      while (end > 0 && (".,;:!?'\"*_~`]}".includes(shown[end - 1]) || (shown[end - 1] === ")" && !shown.slice(0, end).includes("(")))) end--;
      shown = shown.slice(0, end);
    }
    const address = safeAddress(shown);
    if (!address) return this.plain(i, 1);
    this.made.push(link(address, shown));
    return i + (found[1] ? found[0].length : shown.length);
  }

  bracket(i, c) {
    const length = c === "!" ? 2 : 1;
    if (this.open.length < MAX_OPEN) this.open.push({ char: "[", count: 1, at: this.made.length, isImage: length === 2 });
    return this.plain(i, length);
  }

  closeBracket(i) {
    const place = this.find("[");
    if (place < 0) return this.plain(i, 1);
    const { at, isImage } = this.open[place];
    const end = this.text[i + 1] === "(" ? this.text.indexOf(")", i + 2) : -1;
    const inside = end < 0 || end - i > MAX_ADDRESS ? null : this.text.slice(i + 2, end).trim().split(/\s/)[0];
    const address = inside === null ? null : safeAddress(inside.replace(/^<|>$/g, ""));
    this.drop(place);
    if (!address) return this.plain(i, 1);
    const shown = this.nodes(at).slice(1);
    const isLinked = shown.some((node) => node instanceof Element && (node.matches("a") || node.querySelector("a")));
    const label = shown.length ? shown : [address];
    if (isLinked) this.made.push(...label);
    else this.made.push(isImage ? link(address, "image: ", ...label) : link(address, ...label));
    return end + 1;
  }

  marks(i, c) {
    const { text } = this;
    const length = run(text, i);
    const [before, after] = [text[i - 1], text[i + length]];
    const left = !isSpace(after) && (!isMark(after) || isSpace(before) || isMark(before));
    const right = !isSpace(before) && (!isMark(before) || isSpace(after) || isMark(after));
    let canOpen = left && (c !== "_" || !right || isMark(before));
    let canClose = right && (c !== "_" || !left || isMark(after));
    if (length > MAX_RUN || (c === "~" && length !== 2)) canOpen = canClose = false;
    let rest = length;
    while (canClose && rest > 0) {
      const place = this.find(c);
      if (place < 0) break;
      rest -= this.wrap(place, rest);
    }
    if (rest > 0 && canOpen && this.open.length < MAX_OPEN) this.open.push({ char: c, count: rest, at: this.made.length });
    if (rest > 0) this.made.push(c.repeat(rest));
    return i + length;
  }

  /** The place of the last open mark of a kind, or -1. */
  find(char) {
    const floor = Math.min(this.floor[char] ?? 0, this.open.length);
    for (let place = this.open.length - 1; place >= floor; place--) if (this.open[place].char === char) return place;
    this.floor[char] = this.open.length;
    return -1;
  }

  /** Forget open marks from `place` on; they stay text. */
  drop(place) {
    this.open.length = place;
    for (const char in this.floor) this.floor[char] = Math.min(this.floor[char], place);
  }

  /** Put what follows the mark at `place` into an element; how many marks that took. */
  wrap(place, available) {
    const mark = this.open[place];
    const used = mark.char === "~" ? 2 : Math.min(mark.count, available, 2);
    const tag = mark.char === "~" ? "del" : used === 2 ? "strong" : "em";
    const inner = this.nodes(mark.at + 1);
    mark.count -= used;
    this.made[mark.at] = mark.char.repeat(mark.count);
    this.made.push(element(tag, {}, ...inner));
    this.drop(mark.count > 0 ? place + 1 : place);
    return used;
  }

  /** Take what was made from `at` on. */
  nodes(at) {
    return this.made.splice(at).filter((node) => node !== "");
  }
}

/** How often the character at i stands there in a row. */
function run(text, i) {
  let end = i + 1;
  while (text[end] === text[i]) end++;
  return end - i;
}
