"use strict";
// All that this page does beyond being read: sort, filter, and Escape to close a tooltip.
document.documentElement.classList.add("js-on");
document.addEventListener("DOMContentLoaded", () => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const say = (text) => { const count = document.getElementById("count"); if (count) count.value = text; };

  const table = document.getElementById("table");
  if (table) {
    const original = all("tbody", table).map((body) => [body, [...body.rows]]);
    const rows = all("tbody tr[id]", table);
    const heads = all("thead th", table);

    const sort = (column, direction) => {
      heads.forEach((head, at) => at === column && direction
        ? head.setAttribute("aria-sort", direction) : head.removeAttribute("aria-sort"));
      table.classList.toggle("sorted", Boolean(direction));
      if (!direction) { original.forEach(([body, its]) => body.append(...its)); return; }
      const sign = direction === "ascending" ? 1 : -1;
      const value = (row) => {
        const text = row.cells[column]?.dataset.v;
        return text === undefined || text === "" ? null
          : heads[column].classList.contains("num") ? Number(text) : text.toLowerCase();
      };
      const known = rows.map((row) => [row, value(row)]);
      known.sort(([, a], [, b]) => a === null || b === null
        ? (a === null) - (b === null) : sign * (a < b ? -1 : a > b ? 1 : 0));
      original[0][0].append(...known.map(([row]) => row));
    };
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      const order = head.classList.contains("num") ? ["descending", "ascending"] : ["ascending", "descending"];
      button.addEventListener("click", () => {
        const now = order.indexOf(head.getAttribute("aria-sort"));
        sort(column, [...order, null][now + 1]);
      });
    });

    const filter = document.getElementById("filter");
    const off = new Set();
    const show = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      all("[data-dtype]").forEach((one) => { one.hidden = off.has(one.dataset.dtype); });
      rows.forEach((row) => {
        const text = row.textContent.toLowerCase();
        row.hidden ||= !words.every((word) => text.includes(word));
      });
      say(words.length || off.size ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "");
    };
    filter.addEventListener("input", show);
    all("[data-dtype-switch]").forEach((button) => button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!on));
      off[on ? "add" : "delete"](button.dataset.dtypeSwitch);
      show();
    }));
  }

  const cards = all(".card");
  if (cards.length) {
    const search = document.getElementById("search"), family = document.getElementById("family");
    const tags = all("[data-tag]");
    const show = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = tags.filter((tag) => tag.getAttribute("aria-pressed") === "true").map((tag) => tag.dataset.tag);
      cards.forEach((card) => {
        const its = card.dataset.tags.split(" ");
        card.hidden = !(words.every((word) => card.dataset.text.includes(word))
          && (!family.value || card.dataset.family === family.value)
          && wanted.every((tag) => its.includes(tag)));
      });
      say(`${cards.filter((card) => !card.hidden).length} of ${cards.length}`);
    };
    search.addEventListener("input", show);
    family.addEventListener("change", show);
    tags.forEach((tag) => tag.addEventListener("click", () => {
      tag.setAttribute("aria-pressed", String(tag.getAttribute("aria-pressed") !== "true"));
      show();
    }));
    search.form.addEventListener("submit", (event) => event.preventDefault());
  }

  // A tooltip that is in the way goes with Escape, and is back when its bar is left.
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") all(".bar:hover, .bar:focus-within").forEach((bar) => bar.classList.add("quieted"));
  });
  all(".bar").forEach((bar) => ["mouseleave", "focusout"].forEach((left) =>
    bar.addEventListener(left, () => bar.classList.remove("quieted"))));
});
