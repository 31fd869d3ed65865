//! Settings in the environment. Tests set it before the first call; it is read once.

use std::{env, str::FromStr};

/// A variable's value.
pub fn text(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A value of a type that can be read from text.
///
/// # Errors
/// Names the variable.
pub fn choice<T: FromStr>(name: &str, otherwise: T) -> Result<T, String>
where
    T::Err: ToString,
{
    match text(name) {
        None => Ok(otherwise),
        Some(value) => value.trim().parse().map_err(|e: T::Err| format!("{name}={value}: {}", e.to_string())),
    }
}

/// Distinct from [`choice`] only in that an empty value is as good as none.
///
/// # Errors
/// Names the variable.
pub fn number<T: FromStr>(name: &str, otherwise: T) -> Result<T, String>
where
    T::Err: ToString,
{
    if text(name).is_none_or(|value| value.trim().is_empty()) {
        Ok(otherwise)
    } else {
        choice(name, otherwise)
    }
}
