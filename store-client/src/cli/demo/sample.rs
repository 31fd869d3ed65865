//! A model of realistic size for a demo without a file: a small transformer with the same bytes each time.

use std::path::Path;

use haulier::Dtype;

use crate::cli::{
    exit::Result,
    model::{self, NewTensor},
};

const VOCABULARY: usize = 32_000;
const WIDTH: usize = 1024;
const MLP_WIDTH: usize = 2816;
const LAYERS: usize = 12;

/// Writes the model.
pub(crate) fn write(path: &Path) -> Result<()> {
    model::write(
        path,
        tensors()
            .into_iter()
            .map(|(name, dtype, shape)| (name.clone(), tensor(name, dtype, shape)))
            .collect(),
    )
}

/// Embeddings and attention in bf16, the MLP in fp8, norms in f32; and the two shapes that are easy to get wrong.
fn tensors() -> Vec<(String, Dtype, Vec<usize>)> {
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_owned(), Dtype::BF16, vec![VOCABULARY, WIDTH]),
        ("model.norm.weight".to_owned(), Dtype::F32, vec![WIDTH]),
        ("model.no_bias".to_owned(), Dtype::F32, vec![0, WIDTH]),
        ("optimizer.step".to_owned(), Dtype::I64, vec![]),
    ];
    for layer in 0..LAYERS {
        let mut add = |name: &str, dtype, shape| {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), dtype, shape));
        };
        for projection in ["q_proj", "k_proj", "v_proj", "o_proj"] {
            add(&format!("self_attn.{projection}"), Dtype::BF16, vec![WIDTH, WIDTH]);
        }
        add("mlp.gate_proj", Dtype::F8_E4M3, vec![MLP_WIDTH, WIDTH]);
        add("mlp.up_proj", Dtype::F8_E4M3, vec![MLP_WIDTH, WIDTH]);
        add("mlp.down_proj", Dtype::F8_E4M3, vec![WIDTH, MLP_WIDTH]);
        add("input_layernorm", Dtype::F32, vec![WIDTH]);
        add("post_attention_layernorm", Dtype::F32, vec![WIDTH]);
    }
    tensors
}

/// One at a time is made, when it is written.
fn tensor(name: String, dtype: Dtype, shape: Vec<usize>) -> NewTensor<'static> {
    let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
    NewTensor { dtype, shape, len, bytes: Box::new(move || noise(&name, len).into()) }
}

/// Bytes that look random and depend on the name alone.
fn noise(name: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(name.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_of_realistic_size_and_has_the_odd_shapes() {
        let tensors = tensors();
        let bytes: usize = tensors
            .iter()
            .map(|(_, dtype, shape)| shape.iter().product::<usize>() * dtype.bitsize() / 8)
            .sum();
        assert!((240 << 20..280 << 20).contains(&bytes), "{bytes}");
        assert!(tensors.iter().any(|(_, _, shape)| shape.contains(&0)));
        assert!(tensors.iter().any(|(_, _, shape)| shape.is_empty()));
    }

    #[test]
    fn the_bytes_are_the_same_each_time_and_differ_between_tensors() {
        assert_eq!(noise("a", 100), noise("a", 100));
        assert_ne!(noise("a", 100), noise("b", 100));
    }
}
