// The filter of tables: shows the rows that contain every word of the box, in the tables below it (docs/site.py).
"use strict";

for (const box of document.querySelectorAll(".table-filter")) {
  const input = box.querySelector("input"), count = box.querySelector("output");
  const tables = [...document.querySelectorAll("article table")].filter(
    (table) => box.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING);
  const rows = tables.flatMap((table) => [...table.tBodies[0].rows]);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const filter = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => texts.get(row).includes(word));
    for (const table of tables) {
      const whole = table.closest(".md-typeset__scrollwrap") ?? table, before = whole.previousElementSibling;
      whole.hidden = [...table.tBodies[0].rows].every((row) => row.hidden);
      if (before?.matches("h2, h3")) before.hidden = whole.hidden; // a section that is its table
    }
    const shown = rows.filter((row) => !row.hidden).length;
    count.value = words.length ? `${shown.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows` : "";
  };
  input.addEventListener("input", filter);
  box.hidden = false;
  filter(); // a browser may keep the words when the page is loaded again
}
