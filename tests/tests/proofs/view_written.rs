use haulier::View;

/// A value that is stored does not change.
fn write(view: &mut View) {
    view[0] = 1;
}

fn main() {}
