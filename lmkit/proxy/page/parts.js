// Parts of the page. All text goes in as text: nothing that a node, a client or an administrator writes is markup.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 32;

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A line of the values over time; null is a gap. `top` is at least the upper end. The text beside it says what it shows. */
export function chart(values, top) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(...values.map((value) => value ?? 0), top);
  let points = [];
  const end = () => {
    if (points.length < 2) return (points = []);
    const line = document.createElementNS(SVG, "polyline");
    line.setAttribute("points", points.join(" "));
    svg.append(line);
    points = [];
  };
  values.forEach((value, i) => {
    if (value === null) return end();
    const x = (WIDTH * i) / Math.max(1, values.length - 1);
    points.push(`${x.toFixed(1)},${(HEIGHT - 1 - ((HEIGHT - 2) * value) / most).toFixed(1)}`);
  });
  end();
  return svg;
}

export function tile(label, text, values, top = 1e-9) {
  return element("li", {}, element("span", { class: "label" }, label), element("strong", {}, text), chart(values, top));
}

/** A bar with its text, for a share between 0 and 1. */
export function bar(share, text, label) {
  const meter = element("meter", { min: 0, max: 1, high: 0.9, value: Math.min(1, share), "aria-label": label });
  return element("span", { class: "bar" }, meter, ` ${text}`);
}

export function button(text, label, act) {
  const made = element("button", { type: "button", class: "plain", "aria-label": label }, text);
  made.addEventListener("click", act);
  return made;
}

/** A table in a region that scrolls by itself. Rows are lists of texts, elements or lists of them. */
export function table(target, name, columns, rows) {
  const focused = target.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, ...[cell].flat()))));
  const empty = element("tr", {}, element("td", { colspan: columns.length }, "none"));
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...(body.length ? body : [empty])));
  const left = target.firstChild?.scrollLeft ?? 0;
  const region = element("div", { role: "region", tabindex: "0", "aria-label": name }, made);
  target.replaceChildren(region);
  region.scrollLeft = left;
  if (focused) [...target.querySelectorAll("[aria-label]")].find((part) => part.ariaLabel === focused)?.focus();
}
