// Numbers as people read them.

const MIB = 1048576;
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fixed = [0, 1, 2].map(
  (digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
);

export const count = (value) => whole.format(value);

export const mib = (bytes, digits = 1) => fixed[digits].format(bytes / MIB);

export function duration(seconds) {
  if (seconds < 0.9995) return `${whole.format(seconds * 1000)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${whole.format(seconds)} s`;
}

export const percent = (ratio) => `${(100 * ratio).toFixed(ratio > 0 && ratio < 0.0995 ? 1 : 0)} %`;

export const rate = (perSecond) => (perSecond < 10 ? perSecond.toFixed(1) : whole.format(perSecond));

/** `1 token`, `2 tokens`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Digits after the point at which the parts of a whole of so many bytes are told. */
export const mibDigits = (total) => (total < 4096 * MIB ? 2 : 1);

/**
 * Parts of a whole in MiB, as text, that add up to the whole as it is shown: each is rounded down, and the largest
 * remainders get what is missing. No part is off by a last digit or more.
 */
export function mibParts(parts, total) {
  const digits = mibDigits(total);
  const unit = MIB / 10 ** digits;
  const exact = parts.map((bytes) => bytes / unit);
  const shown = exact.map(Math.floor);
  let missing = Math.round(total / unit) - shown.reduce((sum, value) => sum + value, 0);
  const order = exact.map((value, index) => [value - shown[index], index]).sort((a, b) => b[0] - a[0]);
  for (const [, index] of order) {
    if (missing <= 0) break;
    shown[index] += 1;
    missing -= 1;
  }
  return shown.map((value) => fixed[digits].format(value / 10 ** digits));
}
