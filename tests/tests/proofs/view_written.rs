use haulier::View;

/// A value that is stored does not change.
fn write(mut view: View) {
    view[0] = 1;
}

fn main() {}
