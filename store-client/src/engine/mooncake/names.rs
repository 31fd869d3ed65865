//! What a key is called in Mooncake, where all tenants share one flat space of names.
//!
//! ```text
//! haulier/h/NAMESPACE/KEY          the head: what the value is, and the bytes of a small one
//! haulier/b/NAMESPACE/KEY%/ID      the body: the bytes of a larger one
//! ```
//! In a namespace `%` and `/` are escaped, in a key `%` and the byte 0; so no two of them share a name, and what begins a
//! key begins its name.

use std::ffi::CString;

use super::head::Id;

/// The names of one namespace.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    heads: String,
    bodies: String,
}

impl Names {
    pub(crate) fn new(namespace: &str) -> Self {
        let space = escaped(namespace, &['%', '/', '\0']);
        Names { heads: format!("haulier/h/{space}/"), bodies: format!("haulier/b/{space}/") }
    }

    pub(crate) fn head(&self, key: &str) -> CString {
        c_string(format!("{}{}", self.heads, escaped(key, &KEY)))
    }

    pub(crate) fn body(&self, key: &str, id: Id) -> CString {
        c_string(format!("{}{}%/{:032x}", self.bodies, escaped(key, &KEY), id.0))
    }

    /// Regular expressions for the heads, and for the bodies, of the keys that begin with `prefix`.
    pub(crate) fn matching(&self, prefix: &str) -> [CString; 2] {
        let prefix = escaped(prefix, &KEY);
        [&self.heads, &self.bodies]
            .map(|space| c_string(format!("^{}", literal(&format!("{space}{prefix}")))))
    }
}

const KEY: [char; 2] = ['%', '\0'];

fn escaped(text: &str, special: &[char]) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if special.contains(&c) {
            out.push_str(&format!("%{:02x}", u32::from(c)));
        } else {
            out.push(c);
        }
    }
    out
}

/// The text as a regular expression that matches it alone.
fn literal(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if r"\^$.|?*+()[]{}".contains(c) {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

fn c_string(text: String) -> CString {
    // No byte is 0: they are escaped.
    CString::new(text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: CString) -> String {
        name.into_string().unwrap()
    }

    #[test]
    fn no_two_keys_of_no_two_namespaces_share_a_name() {
        let keys = ["a", "a/b", "a%2fb", "a%", "a%/", "a\0", "a%00", "%", "b", "é"];
        let spaces = ["", "/", "%", "a", "a/", "%2f", "a%2f", "h", "b"];
        let mut seen = std::collections::BTreeSet::new();
        for space in spaces {
            let names = Names::new(space);
            for key in keys {
                assert!(seen.insert(text(names.head(key))), "{space:?} {key:?}");
                assert!(seen.insert(text(names.body(key, Id(1)))), "{space:?} {key:?}");
                assert!(seen.insert(text(names.body(key, Id(2)))), "{space:?} {key:?}");
            }
        }
    }

    #[test]
    fn a_pattern_is_the_prefix_alone() {
        let [heads, bodies] = Names::new("n.").matching("a.(b)%*");
        assert_eq!(text(heads), r"^haulier/h/n\./a\.\(b\)%25\*");
        assert_eq!(text(bodies), r"^haulier/b/n\./a\.\(b\)%25\*");
    }
}
