// A conversation as a tree: an edited message and an answer made anew are further children of the same parent.
//
// A message of the user may have `images` (data: URLs). A node is {id, parent, children, chosen, role, content, ...}: `chosen` is the child that is shown. An answer may have
// `reasoning`, `calls` ({id, name, arguments}), `model`, `finish`, `error` and `figures`; a tool's result has `callId`.

const KEPT = "lmkit.chat"; // in sessionStorage: it ends with the tab

export class Tree {
  constructor(nodes = [{ id: 0, parent: null, children: [], chosen: 0, role: "root" }]) {
    this.nodes = nodes;
  }

  /** The conversation of this tab, or a new one. */
  static kept() {
    try {
      const nodes = JSON.parse(sessionStorage.getItem(KEPT));
      return Array.isArray(nodes) && nodes[0]?.role === "root" ? new Tree(nodes) : new Tree();
    } catch {
      return new Tree();
    }
  }

  keep() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(this.nodes));
    } catch {
      // More than a browser stores: the conversation goes on, and is gone after a reload.
    }
  }

  add(parent, fields) {
    const node = { id: this.nodes.length, parent, children: [], chosen: 0, content: "", ...fields };
    this.nodes.push(node);
    const { children } = this.nodes[parent];
    this.nodes[parent].chosen = children.push(node.id) - 1;
    return node;
  }

  /** The nodes that are shown, from the first message on. */
  path() {
    const found = [];
    for (let node = this.nodes[0]; node.children.length; ) {
      node = this.nodes[node.children[node.chosen]];
      found.push(node);
    }
    return found;
  }

  /** The nodes from the first message to this one. */
  pathTo(id) {
    const found = [];
    for (let node = this.nodes[id]; node.parent !== null; node = this.nodes[node.parent]) found.unshift(node);
    return found;
  }

  get last() {
    return this.path().at(-1) ?? this.nodes[0];
  }

  /** Show the sibling that lies `by` places further. */
  choose(id, by) {
    const parent = this.nodes[this.nodes[id].parent];
    parent.chosen = Math.min(Math.max(parent.chosen + by, 0), parent.children.length - 1);
  }

  /** {index, count} of a node among the children of its parent. */
  place(id) {
    const { children } = this.nodes[this.nodes[id].parent];
    return { index: children.indexOf(id), count: children.length };
  }
}

/** The nodes as messages of OpenAI's API. */
export function messages(nodes, system) {
  const said = nodes.filter((node) => node.content || node.calls?.length || node.role !== "assistant").map(message);
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function message({ role, content, calls, callId, images }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (images?.length) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  if (!calls?.length) return { role, content };
  const called = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, tool_calls: called };
}
