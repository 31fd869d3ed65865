//! Sizes as people write and read them.

use std::{fmt, str::FromStr};

/// A number of bytes on the command line: `4096`, `64KiB`, `1.5 GiB`, `20GB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

/// Unit prefixes; the n-th stands for 1024 or 1000 to the power of n.
const PREFIXES: &str = "kmgtpe";

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse =
            || format!("{text:?} is not a size; write bytes, or 64KiB, 1.5GiB (by 1024), 20GB (by 1000)");
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, suffix) = text.split_at(split);
        let unit = unit(suffix.trim_start()).ok_or_else(refuse)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err(refuse());
        }
        // In integers, so that what is written is what is meant, up to the last byte.
        let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| refuse())?;
        let scale = 10u128.checked_pow(fraction.len() as u32).ok_or_else(refuse)?;
        let bytes = digits.checked_mul(u128::from(unit)).ok_or_else(refuse)? / scale;
        u64::try_from(bytes).map(Size).map_err(|_| format!("{text:?} is more than {} bytes", u64::MAX))
    }
}

fn unit(suffix: &str) -> Option<u64> {
    let suffix = suffix.to_ascii_lowercase();
    let prefix = suffix.strip_suffix('b').unwrap_or(&suffix);
    let (prefix, base) = match prefix.strip_suffix('i') {
        Some(binary) if !binary.is_empty() => (binary, 1024u64),
        Some(_) => return None,
        None => (prefix, 1000),
    };
    if prefix.is_empty() {
        return Some(1);
    }
    let power = PREFIXES.find(prefix).filter(|_| prefix.len() == 1)?;
    base.checked_pow(power as u32 + 1)
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0 as f64;
        let mut power = 0;
        // What would print as 1024.0 belongs to the next unit.
        while rest >= 1023.95 && power < PREFIXES.len() {
            rest /= 1024.0;
            power += 1;
        }
        match power.checked_sub(1).and_then(|n| PREFIXES.get(n..=n)) {
            None => write!(f, "{} B", self.0),
            Some(prefix) if rest.fract() == 0.0 => write!(f, "{rest} {}iB", prefix.to_ascii_uppercase()),
            Some(prefix) => write!(f, "{rest:.1} {}iB", prefix.to_ascii_uppercase()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_suffixes_are_read() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4096B", 4096),
            ("64KiB", 64 << 10),
            ("64 kib", 64 << 10),
            ("64Ki", 64 << 10),
            ("1GiB", 1 << 30),
            ("1.5GiB", 3 << 29),
            (".5KiB", 512),
            ("20GB", 20_000_000_000),
            ("20G", 20_000_000_000),
            ("1.001kB", 1001),
            ("2TiB", 2 << 40),
            ("15EiB", 15 << 60),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in
            ["", "B", "KiB", ".", "1.2.3", "-1", "1iB", "1KM", "1Kix", "one", "16EiB", "1e9", "1.5.GiB"]
        {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
        let long = "9".repeat(60);
        assert!(long.parse::<Size>().is_err());
        assert!(format!("0.{long}").parse::<Size>().is_err());
    }

    #[test]
    fn sizes_are_shown_in_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (256 << 20, "256 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }
}
