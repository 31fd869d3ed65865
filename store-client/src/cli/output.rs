//! What goes to stdout and stderr. Nothing here panics when the other end of a pipe is closed, as `println!` would.

use std::{
    fmt::Display,
    io::{self, ErrorKind, IsTerminal, Write},
    path::Path,
    time::Duration,
};

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::{
    exit::{Failure, Result},
    size::Size,
};

/// How results are shown.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
}

impl Output {
    /// Shows a result: as one line of JSON for programs, else the text.
    pub(crate) fn show(self, value: &impl Serialize, text: impl FnOnce() -> String) -> Result<()> {
        if self.json {
            let json = serde_json::to_string(value).map_err(|e| Failure::system("writing JSON", e))?;
            return print(json);
        }
        match text() {
            text if text.is_empty() => Ok(()),
            text => print(text),
        }
    }
}

/// Writes a line, or several, to stdout.
pub(crate) fn print(text: impl Display) -> Result<()> {
    write(format!("{text}\n").as_bytes())
}

/// Writes bytes as they are to stdout.
pub(crate) fn write(bytes: &[u8]) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::nobody_reads(),
        _ => Failure::system("writing to stdout", e),
    })
}

/// Writes a line to stderr. Where that fails there is nobody left to tell.
pub(crate) fn complain(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Whether a person reads stdout.
pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// A size for whoever reads stdout: a person gets a unit, a program all digits.
pub(crate) fn size(bytes: u64) -> String {
    if is_terminal() { Size(bytes).to_string() } else { bytes.to_string() }
}

/// An empty table. Columns whose header starts with `>` are aligned to the right.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().map(|name| name.trim_start_matches('>')));
    for (column, name) in table.column_iter_mut().zip(header) {
        column.set_padding((0, 2));
        if name.starts_with('>') {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    // Lines are folded for a person; whoever parses them wants each row on one line.
    let fold = if is_terminal() { ContentArrangement::Dynamic } else { ContentArrangement::Disabled };
    table.set_content_arrangement(fold);
    table
}

/// A progress bar over `total` bytes on stderr; hidden where that is no terminal.
pub(crate) fn bar(what: &'static str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what);
    match ProgressStyle::with_template(
        "{msg} [{bar:40}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    ) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Says on stderr what is being done; hidden where that is no terminal.
pub(crate) fn stages() -> ProgressBar {
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(100));
    spinner
}

/// Bytes per second, in units of 10^9.
pub(crate) fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// A name that anybody may have chosen, without what would move a terminal's cursor or break a line.
pub(crate) fn plain(name: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    name.chars().map(escape).collect()
}

/// A file's name, as [`plain`].
pub(crate) fn path(path: &Path) -> String {
    plain(&path.to_string_lossy())
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_one_line_per_row_and_aligns_numbers() {
        let mut table = table(&["KEY", ">BYTES"]);
        table.add_row(["a", "5"]);
        table.add_row(["a long key with spaces", "12345"]);
        let lines: Vec<String> = table.trim_fmt().lines().map(str::to_owned).collect();
        assert_eq!(
            lines,
            [
                "KEY                     BYTES",
                "a                           5",
                "a long key with spaces  12345"
            ]
        );
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        assert_eq!(plain("a\nb\x1b[2J \u{e9}"), "a\\nb\\u{1b}[2J \u{e9}");
    }

    #[test]
    fn counts_and_rates_are_plain() {
        assert_eq!((count(1, "tensor"), count(0, "tensor")), ("1 tensor".into(), "0 tensors".into()));
        assert_eq!((rate(2_000_000_000, 2.0), rate(1, 0.0)), (1.0, 0.0));
    }
}
