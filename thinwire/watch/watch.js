// Asks for the page's parts every two seconds and shows those that have changed. The server has escaped all text.
"use strict";

const PERIOD = 2000; // milliseconds
const shown = new Map();

async function refresh() {
  const connection = document.getElementById("connection");
  try {
    const answer = await fetch("parts", { cache: "no-store" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const parts = await answer.json();
    for (const [name, html] of Object.entries(parts)) await put(name, html);
    connection.textContent = `Following; read at ${new Date().toLocaleTimeString()}.`;
    connection.classList.remove("lost");
  } catch (error) {
    connection.textContent =
      `No connection (${error.message}): the command that serves this page, or the forwarding to it, has ended. ` +
      "Below is what was last read.";
    connection.classList.add("lost");
  }
}

async function put(name, html) {
  if (shown.get(name) === html) return;
  const fresh = document.createElement("div");
  fresh.innerHTML = html;
  await Promise.allSettled([...fresh.querySelectorAll("img")].map((image) => image.decode())); // no flicker
  const place = document.getElementById(name);
  const boxes = () => [...place.querySelectorAll(".wide, .broad")];
  const scrolled = boxes().map((box) => box.scrollLeft);
  place.replaceChildren(...fresh.childNodes);
  boxes().forEach((box, at) => { box.scrollLeft = scrolled[at] || 0; });
  shown.set(name, html);
}

async function follow() {
  if (!document.hidden) await refresh();
  setTimeout(follow, PERIOD);
}

follow();
