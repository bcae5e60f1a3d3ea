"use strict";
// Three comforts: one hover box for cells and chart marks, tables that sort, and a switch for light and dark. The page is whole without them.
(() => {
  const tip = document.getElementById("tip");
  const textOf = (node) => {
    const found = node.closest?.("[title], [data-tip], figure svg [aria-label]");
    if (found?.title) {
      // The browser's own box would cover ours; screen readers keep the text.
      found.dataset.tip = found.title;
      found.setAttribute("aria-description", found.title);
      found.removeAttribute("title");
    }
    return found && (found.dataset.tip || found.getAttribute("aria-label"));
  };
  const show = (text, x, y) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(8, y - box.height - 12) : y + 16}px`;
  };
  addEventListener("pointermove", (event) => show(textOf(event.target), event.clientX, event.clientY));
  addEventListener("focusin", (event) => {
    const box = event.target.getBoundingClientRect();
    show(textOf(event.target), box.left, box.bottom - 10);
  });
  addEventListener("focusout", () => show(null));
  addEventListener("keydown", (event) => event.key === "Escape" && show(null));

  const value = (row, column) => {
    const cell = row.cells[column], data = cell?.querySelector("data");
    return data ? Number(data.value) : cell?.textContent.trim() ?? "";
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
    return typeof a === "number" ? -1 : 1;
  };
  for (const table of document.querySelectorAll(".sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.ariaSort === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.ariaSort = down ? "descending" : "ascending";
        const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? -1 : 1) * compare(value(a, column), value(b, column)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  const theme = document.getElementById("theme"), root = document.documentElement;
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
    root.dataset.theme = dark ? "light" : "dark";
  });

  const unfold = () => document.getElementById(location.hash.slice(1))?.matches("details") && (document.getElementById(location.hash.slice(1)).open = true);
  addEventListener("hashchange", unfold);
  unfold();
})();
