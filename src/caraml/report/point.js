// One point in full: chosen from the list, or by its name in the table.
{
  const which = byId("which"), full = byId("full");
  const definitions = (pairs) => make("dl", { class: "facts" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  const heads = ["Number", "Value", "Uncertainty", "Boundary", "Source"];

  const numbers = (metrics, point) => {
    const lines = point.numbers.map((number) => {
      const [, title, text, value, uncertainty, scope, source, note] = number;
      const shown = value === null ? text || "not known" : make("data", { value }, text);
      const cell = make("td", { class: value === null ? "n none" : "n", "data-tip": numberText(metrics, point, number) }, shown);
      const name = make("button", { type: "button", class: "what", "data-tip": metrics[number[0]][1] }, title);
      return make("tr", {}, make("th", { scope: "row" }, name), cell, make("td", {}, uncertainty), make("td", {}, scope), make("td", { class: "reason" }, [source, note].filter(Boolean).join("; ")));
    });
    const head = make("thead", {}, make("tr", {}, ...heads.map((text, index) => make("th", { scope: "col", ...(index === 1 && { class: "n" }) }, text))));
    return make("div", { class: "scroll", role: "region", "aria-label": `Numbers of ${point.label}`, tabindex: 0 }, make("table", { class: "metrics" }, head, make("tbody", {}, ...lines)));
  };

  const table = ({ title, columns, rows }) => {
    const head = make("thead", {}, make("tr", {}, ...columns.map((text) => make("th", { scope: "col" }, text))));
    const lines = rows.map((row) => make("tr", {}, ...row.map((text) => make("td", {}, text))));
    return make("div", { class: "scroll", role: "region", "aria-label": title, tabindex: 0 }, make("table", {}, head, make("tbody", {}, ...lines)));
  };

  const show = async (key) => {
    const { metrics, points } = await known, point = points[key];
    if (!point) return;
    const status = make("p", {}, make("span", { class: `status ${point.status}` }, point.status), point.reason && `: ${point.reason}`);
    const raw = byId("viewer").dataset.raw;
    const files = point.files.flatMap((file) => [" ", raw ? make("a", { href: `${raw}/${key}/${encodeURIComponent(file)}` }, file) : file]);
    const single = (run) => [make("a", { href: `#point=${run[0]}` }, run[1]), ` ${run[2] === "ok" ? run[3] : run[2]}`];
    const about = point.runs
      ? make("ul", { class: "note" }, `${point.window[0].toUpperCase()}${point.window.slice(1)}:`, ...point.runs.map((run) => make("li", {}, ...single(run))))
      : make("p", { class: "note" }, `Times are on the worker's clock: ${point.window}. Key ${key}. Raw files in ${point.folder}:`, ...files);
    full.replaceChildren(make("h3", { id: "shown", tabindex: -1 }, point.label), status, about);
    if (point.flags.length) full.append(definitions(point.flags));
    if (point.trace) full.append(trace(point));
    if (point.numbers.length) full.append(numbers(metrics, point));
    if (point.profile) full.append(make("h4", {}, point.profile.title), table(point.profile), make("p", { class: "note" }, point.profile.notes.join("; ")));
    if (point.facts.length) full.append(make("h4", {}, "Work and data"), definitions(point.facts));
    which.value = key;
  };
  const follow = async () => {
    const key = location.hash.startsWith("#point=") && location.hash.slice(7);
    if (!key) return;
    await show(key);
    byId("shown")?.focus();
    byId("point").scrollIntoView();
  };
  which.addEventListener("change", () => show(which.value));
  addEventListener("hashchange", follow);
  if (which.options.length) {
    byId("viewer").hidden = false;
    if (location.hash.startsWith("#point=")) follow();
    else show(which.value);
  }
}
