
"use strict";
// Rows that are laid out at once: all are in the page, and 10,000 laid out take seconds on a phone.
const FIRST = 300;
for (const section of document.querySelectorAll("section")) {
  const body = section.querySelector("tbody"), tools = section.querySelector(".tools");
  if (!body) continue;
  const input = tools.querySelector("input"), state = tools.querySelector("[role=status]");
  const all = tools.querySelector("button"), rows = Array.from(body.rows);
  let most = FIRST;
  const texts = new Map(rows.map(row => [row, row.textContent.toLowerCase()]));
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const row of body.rows) {
      const fits = words.every(word => texts.get(row).includes(word));
      row.hidden = !(fits && ++found <= most) && row.id !== location.hash.slice(1);
    }
    state.textContent = `${Math.min(found, most)} of ${found} shown, ${rows.length} in all`;
    all.hidden = found <= most;
  };
  input.addEventListener("input", show);
  all.addEventListener("click", () => { most = Infinity; show(); });
  const heads = Array.from(section.querySelectorAll("th"));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => row.cells[column].dataset.sort ?? row.cells[column].textContent;
      const compare = (a, b) => a - b || String(a).localeCompare(String(b), "en", { numeric: true });
      const sorted = rows.map(row => [key(row), row]).sort(([a], [b]) => (up ? 1 : -1) * compare(a, b));
      body.append(...sorted.map(([, row]) => row));
      show();
    });
  });
  addEventListener("hashchange", () => { show(); document.getElementById(location.hash.slice(1))?.scrollIntoView(); });
  tools.hidden = rows.length < 20;
  show();
}
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
