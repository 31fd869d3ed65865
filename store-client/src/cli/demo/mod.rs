//! `haulier demo`: the main job with no set-up, from one process through a node into another, and the proof of it.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use haulier::StoreClient;
use serde::Serialize;

use self::{
    plan::{PART, Way},
    roles::{Digest, Leg, Report},
};
use super::{
    child::{Helper, Interrupts, PrivateNode, private_dir},
    counters::{self, PathCount},
    exit::{Failure, Result},
    global::{self, Global},
    memory,
    model::{FileTensor, Model},
    output,
    size::Size,
};

mod plan;
mod roles;
mod sample;

/// Haul a model from one process to another, byte for byte, with no set-up
///
/// Starts a node on a private socket, puts every tensor of FILE from one process, gets and views them from another,
/// compares bytes and digests with the file, and shows what went which way and how fast. Leaves nothing behind.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A safetensors file [default: a small transformer of 258 MiB is made]
    file: Option<PathBuf>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RoleArgs {
    #[arg(value_enum)]
    role: Role,
    file: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Role {
    Put,
    Get,
}

#[derive(Debug, Serialize)]
struct Demo {
    /// None for the model that was made.
    file: Option<String>,
    tensors: u64,
    bytes: u64,
    legs: Vec<Leg>,
    /// What the node counted.
    paths: Vec<PathCount>,
    digest: String,
    wrong: Vec<String>,
    exact: bool,
}

pub(crate) fn run(global: &Global, args: &Args) -> Result<()> {
    global.node_only("demo")?;
    let interrupts = Interrupts::watch()?;
    let dir = private_dir("haulier-demo-")?;
    let outcome = haul(global, args, dir.path(), &interrupts);
    let place = dir.path().to_owned();
    let removed =
        dir.close().map_err(|e| Failure::system(format_args!("removing {}", output::path(&place)), e));
    let demo = outcome.map_err(|e| interrupts.explain(e))?;
    removed?;
    global.output().show(&demo, || text(&demo))?;
    if demo.exact { Ok(()) } else { Err(Failure::refused("what came back is not what was put")) }
}

/// Runs one of the demo's processes.
pub(crate) fn run_role(global: &Global, args: &RoleArgs) -> Result<()> {
    let model = Model::open(&args.file)?;
    let tensors = model.tensors()?;
    let client = global.connect()?;
    let report = match args.role {
        Role::Put => roles::put(&client, &tensors)?,
        Role::Get => roles::get(&client, &tensors)?,
    };
    global.output().show(&report, String::new)
}

fn haul(global: &Global, args: &Args, dir: &Path, interrupts: &Interrupts) -> Result<Demo> {
    let stage = output::stages();
    let file = match &args.file {
        Some(file) => file.clone(),
        None => {
            stage.set_message("making a model");
            let file = dir.join("model.safetensors");
            sample::write(&file)?;
            file
        }
    };
    let model = Model::open(&file)?;
    let tensors = model.tensors()?;
    let bytes = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
    let pool = pool_for(&tensors);
    memory::require(pool + beside(&tensors), "the demo")?;
    interrupts.check()?;

    stage.set_message("starting a node");
    let node = PrivateNode::start(global, dir, pool, interrupts)?;
    stage.set_message("putting from one process");
    let put = role(global, "put", &file, dir, &node, interrupts)?;
    stage.set_message("getting from another");
    let got = role(global, "get", &file, dir, &node, interrupts)?;
    stage.set_message("comparing digests");
    let digest = digest(&tensors);
    let paths = paths(global, &node)?;
    node.stop()?;
    stage.finish_and_clear();

    let exact = got.wrong.is_empty() && got.digest == digest;
    Ok(Demo {
        // JSON holds text, a file's name need not be any.
        file: args.file.as_ref().map(|file| file.to_string_lossy().into_owned()),
        tensors: tensors.len() as u64,
        bytes,
        legs: [put.legs, got.legs].concat(),
        paths,
        digest,
        wrong: got.wrong,
        exact,
    })
}

/// Room for every tensor, rounded up as the store does it, and for what writers keep at hand.
fn pool_for(tensors: &[FileTensor<'_>]) -> u64 {
    let bytes: u64 = tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum();
    let small = 128 * tensors.len() as u64;
    bytes + bytes / 4 + small + (64 << 20)
}

/// Bytes that a process of the demo takes beside the node and the file.
fn beside(tensors: &[FileTensor<'_>]) -> u64 {
    let largest = tensors.iter().map(|tensor| tensor.bytes.len()).max().unwrap_or(0);
    2 * largest.max(PART) as u64
}

fn role(
    global: &Global,
    role: &'static str,
    file: &Path,
    dir: &Path,
    node: &PrivateNode,
    interrupts: &Interrupts,
) -> Result<Report> {
    let mut args = global.for_child(node.socket().to_owned());
    args.extend(["demo-role".into(), role.into(), "--".into(), file.into()]);
    Helper::start(dir, role, &args)?.result(interrupts)
}

fn digest(tensors: &[FileTensor<'_>]) -> String {
    let mut digest = Digest::default();
    for tensor in tensors {
        digest.add(&tensor.name, tensor.dtype, &tensor.shape, tensor.bytes);
    }
    digest.hex()
}

fn paths(global: &Global, node: &PrivateNode) -> Result<Vec<PathCount>> {
    let client = StoreClient::connect(global::host()?, node.socket(), global.options())?;
    Ok(counters::paths(&[], &counters::of(&client)?))
}

fn text(demo: &Demo) -> String {
    let name =
        demo.file.as_ref().map_or_else(|| "a model made for this".to_owned(), |file| output::plain(file));
    let mut text = format!("{name}: {}, {}\n", output::count(demo.tensors, "tensor"), Size(demo.bytes));
    let mut legs =
        output::table(&["PROCESS", "OPERATION", "MEMORY", ">TENSORS", ">BYTES", ">SECONDS", ">GB/S"]);
    for leg in &demo.legs {
        let copies = !matches!(leg.way, Way::StoreMemory | Way::InPlace);
        legs.add_row([
            if leg.op == "put" { "first" } else { "second" }.to_owned(),
            leg.op.clone(),
            memory_of(leg).to_owned(),
            leg.tensors.to_string(),
            Size(leg.bytes).to_string(),
            format!("{:.6}", leg.seconds),
            if copies { format!("{:.2}", output::rate(leg.bytes, leg.seconds)) } else { "no copy".into() },
        ]);
    }
    text += &format!("\n{}\n\nthe node counted", legs.trim_fmt());
    for path in &demo.paths {
        text += &format!("\n  {path}");
    }
    for wrong in &demo.wrong {
        text += &format!("\nwrong: {wrong}");
    }
    let verdict = if demo.exact { "every tensor came back byte for byte" } else { "NOT the same bytes" };
    text + &format!("\n\n{verdict}; blake3 of the file's tensors {}", demo.digest)
}

fn memory_of(leg: &Leg) -> &'static str {
    match leg.way {
        Way::DeviceBuffer => "device buffer",
        Way::HostMemory if leg.op == "put" => "mapped file",
        Way::HostMemory => "heap",
        Way::StoreMemory => "store memory",
        Way::InPlace => "in place",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_went_which_way() {
        let leg = |op: &str, way| Leg { op: op.into(), way, tensors: 2, bytes: 2_000_000_000, seconds: 1.0 };
        let mut demo = Demo {
            file: Some("m.safetensors".into()),
            tensors: 2,
            bytes: 1 << 20,
            legs: vec![leg("put", Way::DeviceBuffer), leg("view", Way::InPlace)],
            paths: vec![PathCount { op: "put".into(), path: "ipc".into(), values: 2, bytes: 1024 }],
            digest: "abc".into(),
            wrong: vec![],
            exact: true,
        };
        let text_of = |demo: &Demo| text(demo);
        let shown = text_of(&demo);
        assert!(shown.starts_with("m.safetensors: 2 tensors, 1 MiB\n"));
        assert!(
            shown.contains("put by ipc: 2 values, 1 KiB")
                && shown.contains("no copy")
                && shown.contains("2.00")
        );
        assert!(shown.ends_with("every tensor came back byte for byte; blake3 of the file's tensors abc"));
        demo.exact = false;
        demo.wrong.push("w: bytes by a view".into());
        assert!(
            text_of(&demo).contains("wrong: w: bytes by a view") && text_of(&demo).contains("NOT the same")
        );
    }
}
