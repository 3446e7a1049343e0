// Images beside the next message: chosen, pasted or dropped. They are made small, and shown until they are sent.

import { element } from "./markdown.js";
import { icon, thumbnail } from "./view.js";

export const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST = 8; // of one message
const SIDE = 1536; // pixels of the longer side
const AS_IT_IS = 200_000; // bytes; a larger file is drawn anew
const MOST_CHARS = 3_000_000; // of a conversation's images: servers take bodies of 4 MiB unless told otherwise

export class Attachments {
  /** `list` shows the images. `tell(text)` says what is wrong, `used()` is the length of those sent before. */
  constructor(list, { tell, used, changed }) {
    Object.assign(this, { list, tell, used, changed });
    this.urls = [];
    this.isOn = false;
  }

  /** Whether the model takes images. */
  allow(isOn) {
    this.isOn = isOn;
    if (!isOn) this.urls = [];
    this.show();
  }

  async add(files) {
    if (!this.isOn || !files.length) return;
    this.tell("");
    for (const file of files) {
      try {
        const url = await small(file);
        if (this.urls.length >= MOST) throw new Error(`At most ${MOST} images go with a message.`);
        const chars = [...this.urls, url].reduce((sum, one) => sum + one.length, this.used());
        if (chars > MOST_CHARS) throw new Error("The images of this conversation are too large together.");
        this.urls.push(url);
      } catch (error) {
        this.tell(error.message);
      }
    }
    this.show();
  }

  /** The images, which now belong to a message. */
  take() {
    const taken = this.urls;
    this.urls = [];
    this.show();
    return taken;
  }

  show() {
    this.list.replaceChildren(...this.urls.map((url, i) => {
      const title = `Remove image ${i + 1}`;
      const remove = element("button", { type: "button", class: "icon", title, "aria-label": title }, icon("close"));
      remove.addEventListener("click", () => {
        this.urls.splice(i, 1);
        this.show();
      });
      return element("li", {}, thumbnail(url, i), remove);
    }));
    this.list.hidden = !this.urls.length;
    this.changed();
  }
}

/** A file as a data: URL of bounded size. */
async function small(file) {
  if (!TYPES.includes(file.type)) throw new Error("Only images can be attached: PNG, JPEG, WebP or GIF.");
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("This image cannot be read.");
  }
  const scale = SIDE / Math.max(bitmap.width, bitmap.height);
  if (scale >= 1 && file.size <= AS_IT_IS) return read(file);
  const canvas = element("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * Math.min(scale, 1)));
  canvas.height = Math.max(1, Math.round(bitmap.height * Math.min(scale, 1)));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // behind what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(new Error("This image cannot be read."));
    reader.readAsDataURL(file);
  });
}
