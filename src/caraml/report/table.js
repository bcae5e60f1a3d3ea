// The table of results: sorting, filtering, and the arrow keys. One stop of the Tab key leads into it, whatever its length.
{
  const table = byId("table"), head = table.tHead.rows[0], body = table.tBodies[0], rows = [...body.rows];
  const form = byId("filter"), count = byId("count");

  const value = (row, column) => {
    const cell = row.cells[column], data = cell?.querySelector("data");
    return data ? Number(data.value) : cell?.textContent.trim() ?? "";
  };
  const compare = (a, b) => {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : collator.compare(a, b);
    return typeof a === "number" ? -1 : 1;
  };
  const collator = new Intl.Collator(undefined, { numeric: true });
  [...head.cells].forEach((cell, column) => {
    const button = make("button", { type: "button" }, ...cell.childNodes);
    if (cell.dataset.tip) button.dataset.tip = cell.dataset.tip;
    cell.append(button);
    button.addEventListener("click", () => {
      const down = cell.ariaSort === "ascending";
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.ariaSort = down ? "descending" : "ascending";
      const values = new Map(rows.map((row) => [row, value(row, column)]));
      rows.sort((a, b) => {
        const x = values.get(a), y = values.get(b);
        return typeof x === typeof y && down ? compare(y, x) : compare(x, y); // what has no number stays at the end
      });
      body.append(...rows);
    });
  });

  const words = new Map(rows.map((row) => [row, `${row.dataset.workload} ${row.textContent}`.toLowerCase()]));
  // Marks of figures name the points that they show by the beginnings of their keys. A mark goes when all of its points do, a line through
  // points when one of them does, and a figure when nothing is left in it.
  const figures = [...document.querySelectorAll("figure")].map((figure) => [figure, [...figure.querySelectorAll("[data-of], [data-all]")]]);
  const keysOf = new Map(rows.map((row) => [row, (row.dataset.runs ?? row.dataset.key).trim().split(" ").map((key) => key.slice(0, 8))]));
  const narrowFigures = () => {
    const shown = new Set(rows.filter((row) => !row.hidden).flatMap((row) => keysOf.get(row)));
    let away = 0;
    for (const [figure, marks] of figures) {
      let left = 0;
      for (const mark of marks) {
        const { of, all } = mark.dataset;
        const stays = of ? of.split(" ").some((key) => shown.has(key)) : all.split(" ").every((key) => shown.has(key));
        mark.classList.toggle("away", !stays);
        left += stays;
      }
      figure.hidden = marks.length > 0 && !left;
      away += figure.hidden;
    }
    return away;
  };
  const narrow = () => {
    const asked = Object.fromEntries(new FormData(form)), text = asked.text.toLowerCase().split(/\s+/);
    let shown = 0;
    for (const row of rows) {
      const chosen = ["status", "workload", "machine"].every((name) => !asked[name] || row.dataset[name] === asked[name]);
      row.hidden = !(chosen && text.every((word) => words.get(row).includes(word)));
      shown += !row.hidden;
    }
    const all = `${rows.length} point${rows.length === 1 ? "" : "s"}`;
    const away = narrowFigures();
    const without = away ? `; ${away} figure${away === 1 ? "" : "s"} without them hidden` : "";
    count.textContent = shown === rows.length ? all : `${shown} of ${all}, in table and figures${without}`;
    enter();
  };
  form.hidden = false;
  form.addEventListener("input", narrow);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(narrow));

  // What takes the focus in a cell: its link or button, or the cell.
  const stop = (cell) => cell.querySelector("a, button") ?? cell;
  for (const row of table.rows) for (const cell of row.cells) stop(cell).tabIndex = -1;
  let entrance = null;
  const enter = (target) => {
    if (entrance) entrance.tabIndex = -1;
    entrance = target ?? stop((rows.find((row) => !row.hidden) ?? head).cells[0]);
    entrance.tabIndex = 0;
  };
  table.setAttribute("role", "grid");
  table.addEventListener("focusin", (event) => event.target.closest("td, th") && enter(event.target));
  table.addEventListener("keydown", (event) => {
    const cell = event.target.closest("td, th");
    if (!cell || event.altKey || event.metaKey) return;
    const lines = [head, ...[...body.rows].filter((row) => !row.hidden)];
    let line = lines.indexOf(cell.parentNode), column = cell.cellIndex;
    const far = event.ctrlKey;
    if (event.key === "ArrowRight") column += 1;
    else if (event.key === "ArrowLeft") column -= 1;
    else if (event.key === "ArrowDown") line += 1;
    else if (event.key === "ArrowUp") line -= 1;
    else if (event.key === "PageDown") line += 15;
    else if (event.key === "PageUp") line -= 15;
    else if (event.key === "Home") [line, column] = [far ? 0 : line, 0];
    else if (event.key === "End") [line, column] = [far ? lines.length - 1 : line, 99];
    else return;
    event.preventDefault();
    const cells = lines[Math.max(0, Math.min(line, lines.length - 1))].cells;
    const target = stop(cells[Math.max(0, Math.min(column, cells.length - 1))]);
    target.focus();
    target.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  enter();

  const columns = [...head.cells].map((cell) => cell.dataset.metric);
  explained.unshift(
    ["#table tbody td.n", async (cell) => {
      const { metrics, points } = await known;
      const name = columns[cell.cellIndex], point = points[cell.parentNode.dataset.key];
      const number = point.numbers.find(([metric]) => metric === name);
      return number ? numberText(metrics, point, number) : `${metrics[name][1]}\nNot measured.`;
    }],
    ["#table tbody td.state", async (cell) => {
      const { points } = await known, point = points[cell.parentNode.dataset.key];
      return [point.reason && `${point.status}: ${point.reason}`, ...point.flags.map(([flag, text]) => `${flag}: ${text}`)].filter(Boolean).join("\n");
    }],
  );
}

/** Everything about one number, a fact a line. */
function numberText(metrics, point, [name, , , value, uncertainty, scope, source, note]) {
  const lines = [metrics[name][1]];
  if (value !== null) lines.push(uncertainty, point.window);
  if (value !== null && source !== lines[0]) lines.push(`source: ${source}`);
  if (scope) lines.push(`boundary: ${scope}`);
  if (note) lines.push(`note: ${note}`);
  return lines.join("\n");
}
