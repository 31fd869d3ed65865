//! The `haulier` command.
fn main() {}
