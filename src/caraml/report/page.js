"use strict";
// What several parts of the page share: making elements, unpacking what is known of every point, the box that explains, light and dark.
// The page's table and figures are whole without any of this.

const byId = (id) => document.getElementById(id);

/** An element with text or children; text is never read as markup. */
const make = (name, attributes = {}, ...children) => {
  const element = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

/** Everything about every point: base64 of gzip of JSON, unpacked once, when the page has been drawn. */
const known = (async () => {
  await new Promise((done) => addEventListener("load", () => setTimeout(done)));
  const bytes = Uint8Array.from(atob(byId("packed").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
})();

const tip = (() => {
  const box = byId("tip");
  let owner = null, timer = 0;
  const hide = () => {
    clearTimeout(timer);
    owner?.removeAttribute("aria-describedby");
    owner = null;
    box.hidden = true;
  };
  const show = (target, text) => {
    if (target === owner && box.textContent === text) return clearTimeout(timer);
    hide();
    if (!text) return;
    owner = target;
    box.textContent = text;
    box.hidden = false;
    if (target === document.activeElement) target.setAttribute("aria-describedby", "tip");
    const at = target.getBoundingClientRect(), size = box.getBoundingClientRect();
    box.style.left = `${Math.max(8, Math.min(at.left, innerWidth - size.width - 8))}px`;
    box.style.top = `${at.bottom + size.height + 4 > innerHeight ? Math.max(8, at.top - size.height - 4) : at.bottom + 4}px`;
  };
  // Long enough to move the pointer into the box, which may then be read and copied from.
  const leave = () => { clearTimeout(timer); timer = setTimeout(hide, 250); };
  box.addEventListener("pointerenter", () => clearTimeout(timer));
  box.addEventListener("pointerleave", leave);
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
  addEventListener("scroll", () => owner && owner !== document.activeElement && hide(), { passive: true, capture: true });
  return { show, leave, hide };
})();

// What is explained, and how: pairs of a selector and the text for an element that matches it. Parts of the page add theirs.
const explained = [
  ["[data-tip]", (element) => element.dataset.tip],
];
const explain = async (start) => {
  for (const [selector, text] of explained) {
    const element = start.closest?.(selector);
    if (element) return tip.show(element, await text(element));
  }
  return tip.leave();
};
for (const element of document.querySelectorAll("[title]")) {
  // The browser's own box would cover ours, and appears for the pointer only.
  element.dataset.tip = element.title;
  element.removeAttribute("title");
}
addEventListener("pointerover", (event) => byId("tip").contains(event.target) || explain(event.target));
addEventListener("focusin", (event) => explain(event.target));
addEventListener("focusout", tip.hide);

{
  const button = byId("theme"), root = document.documentElement;
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = getComputedStyle(root).getPropertyValue("--dark").trim() === "1";
    root.dataset.theme = dark ? "light" : "dark";
  });
}
