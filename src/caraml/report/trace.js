// Power over time of one point: lowest and highest value of each span of time, drawn for as much of the run as is asked for.
const trace = (point) => {
  const { t: [start, length], c: channels } = point.trace, [H, L, B] = [250, 56, 44];
  let W = 720;
  const spans = channels.map(({ b, l }) => (Array.isArray(b) ? b : l.map((_, index) => b + index)));
  const last = Math.max(...spans.map((span) => span[span.length - 1])) + 1;
  const whole = [start, start + last * length];
  let [from, to] = whole;
  const svg = make("svg:svg", { class: "trace", role: "img" });
  const says = make("output", { class: "note", "aria-live": "polite" });

  const ticks = (low, high, most) => {
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(10)));
    return found;
  };
  const written = (number) => number.toLocaleString("en", { maximumSignificantDigits: 5 });

  const draw = () => {
    const inside = channels.map((_, index) => spans[index].flatMap((span, i) => {
      const at = start + (span + 0.5) * length;
      return at >= from - length && at <= to + length ? [i] : [];
    }));
    const ends = channels.flatMap(({ l, h, q }, index) => inside[index].flatMap((i) => [l[i] * q, (l[i] + h[i]) * q]));
    const low = Math.min(...ends), high = Math.max(...ends, 1e-9);
    const x = (time) => L + ((time - from) / (to - from)) * (W - L - 8), y = (watts) => 24 + (1 - watts / (1.05 * high)) * (H - B - 24);
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
    const label = `Power from ${written(from)} to ${written(to)} s: ${ends.length ? `${written(low)} to ${written(high)} W` : "no reading"}`;
    svg.replaceChildren(make("svg:title", {}, label));
    const clip = make("svg:clipPath", { id: "inside" }, make("svg:rect", { x: L, y: 0, width: W - L - 8, height: H - B }));
    svg.append(make("svg:defs", {}, clip));
    const plot = make("svg:g", { "clip-path": "url(#inside)" });
    if (point.span) {
      const [a, b] = point.span.map(x);
      plot.append(make("svg:rect", { x: a, y: 24, width: Math.max(1, b - a), height: H - B - 24, fill: "var(--shade)" }));
    }
    for (const watts of ticks(0, 1.05 * high, 5)) {
      plot.append(make("svg:path", { d: `M${L} ${y(watts)}H${W}`, stroke: "var(--grid)" }));
      svg.append(make("svg:text", { x: L - 6, y: y(watts) + 4, "text-anchor": "end" }, written(watts)));
    }
    for (const time of ticks(from, to, W / 80)) {
      svg.append(make("svg:path", { d: `M${x(time)} ${H - B}v4`, stroke: "var(--ink)" }));
      svg.append(make("svg:text", { x: Math.min(x(time), W - 16), y: H - B + 17, "text-anchor": "middle" }, written(time)));
    }
    channels.forEach(({ l, h, q }, index) => {
      const colour = `var(--s${index % 7})`, dash = ["none", "7 3", "2 2", "9 3 2 3", "4 4"][index % 5];
      const at = (i) => x(start + (spans[index][i] + 0.5) * length).toFixed(1);
      const up = inside[index].map((i) => `${at(i)} ${y((l[i] + h[i]) * q).toFixed(1)}`);
      const down = inside[index].map((i) => `${at(i)} ${y(l[i] * q).toFixed(1)}`).reverse();
      if (!up.length) return;
      plot.append(make("svg:path", { d: `M${up.join("L")}L${down.join("L")}Z`, fill: colour, "fill-opacity": 0.3 }));
      plot.append(make("svg:path", { d: `M${up.join("L")}`, fill: "none", stroke: colour, "stroke-width": 1.3, "stroke-dasharray": dash }));
    });
    svg.append(plot, make("svg:text", { x: L, y: 13 }, "power [W]"));
    svg.append(make("svg:text", { x: (L + W) / 2, y: H - 6, "text-anchor": "middle" }, "seconds since the start of the worker"));
    says.textContent = label;
  };
  const view = (a, b) => {
    const width = Math.max(4 * length, Math.min(b - a, whole[1] - whole[0]));
    from = Math.max(whole[0], Math.min((a + b) / 2 - width / 2, whole[1] - width));
    to = from + width;
    draw();
  };
  const zoom = (factor) => { const middle = (from + to) / 2, half = ((to - from) / 2) * factor; view(middle - half, middle + half); };
  const move = (share) => { const by = share * (to - from); view(from + by, to + by); };

  // Dragging over the drawing shows that part.
  const time = (event) => {
    const box = svg.getBoundingClientRect();
    return from + ((((event.clientX - box.left) / box.width) * W - L) / (W - L - 8)) * (to - from);
  };
  let held = null;
  svg.addEventListener("pointerdown", (event) => { held = time(event); event.preventDefault(); });
  svg.addEventListener("pointerup", (event) => {
    if (held !== null && Math.abs(time(event) - held) > (to - from) / 50) view(Math.min(held, time(event)), Math.max(held, time(event)));
    held = null;
  });

  const button = (text, action) => {
    const made = make("button", { type: "button" }, text);
    made.addEventListener("click", action);
    return made;
  };
  const controls = make("div", { class: "controls", role: "group", "aria-label": "Part of the run" },
    button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)), button("Earlier", () => move(-0.5)), button("Later", () => move(0.5)),
    button("Whole run", () => view(...whole)));
  if (point.span) controls.append(button("Window", () => view(...point.span)));
  const legend = make("ul", { class: "legend" }, ...channels.map(({ n, k }, index) => {
    const line = { d: "M0 6H28", stroke: `var(--s${index % 7})`, "stroke-width": 2, "stroke-dasharray": ["none", "7 3", "2 2", "9 3 2 3", "4 4"][index % 5] };
    return make("li", {}, make("svg:svg", { class: "key", viewBox: "0 0 28 12", "aria-hidden": "true" }, make("svg:path", line)), `${n} (${k})`);
  }));
  const note = make("p", { class: "note" }, `The band reaches from the lowest to the highest reading of each ${Number(length.toPrecision(2))} s. The shaded span is the window of rate and energy. Drag over the drawing, or use the buttons, to see a part.`);
  draw();
  // As wide as the page lets it be, with text of one size.
  new ResizeObserver(([{ contentRect: { width } }]) => {
    if (width > 0 && Math.abs(width - W) > 2) {
      W = Math.max(300, width);
      draw();
    }
  }).observe(svg);
  return make("figure", { class: "wide" }, make("figcaption", {}, "Power"), controls, svg, says, legend, note);
};
