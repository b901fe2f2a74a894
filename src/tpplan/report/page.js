"use strict";
const all = (query, root = document) => [...root.querySelectorAll(query)];
const told = document.getElementById("told");
const hint = told?.innerHTML;
let chosen = "";

function choose(key) {
  all(".on").forEach((held) => held.classList.remove("on"));
  chosen = key === chosen ? "" : key;
  const row = chosen && document.getElementById(key);
  told.classList.toggle("chosen", Boolean(row));
  if (!row) {
    told.innerHTML = hint;
    return;
  }
  all(`[data-to="${key}"]`).forEach((held) => held.classList.add("on"));
  row.classList.add("on");
  told.replaceChildren(document.getElementById(`${key}-told`).content.cloneNode(true));
  const line = row.dataset.line && document.getElementById(row.dataset.line);
  if (line) {
    line.classList.add("on");
    line.parentElement.scrollTop = line.offsetTop - line.parentElement.offsetTop - 60;
  }
}

function sort(heading) {
  const table = heading.closest("table");
  const place = heading.cellIndex;
  const down = heading.getAttribute("aria-sort") === "ascending";
  all("th", table).forEach((held) => held.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const cell = (row) => row.cells[place];
  const order = (a, b) =>
    "v" in cell(a).dataset
      ? cell(a).dataset.v - cell(b).dataset.v
      : cell(a).textContent.localeCompare(cell(b).textContent, "en", { numeric: true });
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b))));
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("[data-to]");
  if (target) choose(target.dataset.to);
  const heading = event.target.closest("th");
  if (heading && event.target.closest("button")) sort(heading);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") choose("");
  const target = event.target.closest("g[data-to], rect[data-to]");
  if (target && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    choose(target.dataset.to);
  }
});
document.addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase().split(/\s+/);
  all("tbody tr", document.getElementById(event.target.dataset.of)).forEach((row) => {
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
});
document.getElementById("theme").addEventListener("click", () => {
  const style = document.documentElement.style;
  const dark = style.colorScheme ? style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  style.colorScheme = dark ? "light" : "dark";
});
