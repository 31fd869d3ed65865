//! How one daemon serves many clients at once: processes, each of which puts and gets 4 KiB in turns.
//!
//! Each client replaces values of its own and reads those of all, and checks that each is whole and the one that was asked
//! for. All of them begin at the same moment; how long each call took comes back when they have ended.

use std::{
    env,
    fmt::Write as _,
    fs,
    io::{self, BufRead, BufReader, Write as _},
    path::Path,
    process::{ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use haulier::{AnyDevice, StoreClient};
use serde::{Deserialize, Serialize};

use crate::{
    child::Server,
    failure::{During, Failure, Result},
    machine::Machine,
    report::short,
    stores::{Node, connect},
};

/// How the program is told to be a client.
pub const CLIENT: &str = "scale-client";

/// How many clients there are at once.
const CLIENTS: [usize; 4] = [1, 2, 8, 32];
/// Bytes of a value.
const VALUE: usize = 4 << 10;
/// Keys of each client.
const KEYS: usize = 64;

/// Everything about a run.
#[derive(Debug, Serialize)]
pub struct Scale {
    /// Where it ran.
    pub machine: Machine,
    /// Rounds for each number of clients.
    pub rounds: usize,
    /// How long the clients of a round called, in ms.
    pub each_ms: u64,
    /// One for each number of clients.
    pub rows: Vec<Row>,
}

/// So many clients at once.
#[derive(Debug, Serialize)]
pub struct Row {
    /// How many.
    pub clients: usize,
    /// Calls in a second of all of them; of all rounds, the median.
    pub calls_per_s: f64,
    /// The calls of the slowest client by those of the fastest; of all rounds, the least.
    pub fairness: f64,
    /// Of all rounds.
    pub put: Tail,
    /// Of all rounds.
    pub get_into: Tail,
}

/// How long calls took, in µs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Tail {
    /// Half of them no longer than this.
    pub median_us: f64,
    /// 99 of a hundred.
    pub p99_us: f64,
    /// 999 of a thousand.
    pub p999_us: f64,
    /// How many there were.
    pub calls: usize,
}

impl Tail {
    fn of(mut times: Vec<u32>) -> Self {
        times.sort_unstable();
        let part = |part: f64| {
            let rank = (times.len() as f64 * part).ceil() as usize;
            times.get(rank.saturating_sub(1)).map_or(f64::NAN, |&ns| f64::from(ns) / 1e3)
        };
        Tail { median_us: part(0.5), p99_us: part(0.99), p999_us: part(0.999), calls: times.len() }
    }
}

/// What a client says in the end: ns of each call.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Times {
    put: Vec<u32>,
    get_into: Vec<u32>,
}

/// Measures. `go_on` is asked before each round.
///
/// *Errors*: what a client or the daemon says that goes wrong, a wrong byte among them.
pub fn run(
    haulier: &Path,
    dir: &Path,
    rounds: usize,
    each: Duration,
    mut go_on: impl FnMut(usize, usize) -> Result<()>,
) -> Result<Scale> {
    let machine = Machine::here();
    let node = Node::start(haulier, dir, 256 << 20)?;
    let mut all: Vec<Vec<Vec<Times>>> = CLIENTS.map(|_| Vec::new()).into();
    // Rounds in turns, so that whatever else the machine does hits all numbers of clients.
    for round in 0..rounds {
        for (&clients, all) in CLIENTS.iter().zip(&mut all) {
            go_on(round, clients)?;
            all.push(one_round(node.socket(), dir, clients, each)?);
        }
    }
    let rows = CLIENTS.iter().zip(all).map(|(&clients, rounds)| row(clients, rounds, each)).collect();
    Ok(Scale { machine, rounds, each_ms: each.as_millis() as u64, rows })
}

fn row(clients: usize, rounds: Vec<Vec<Times>>, each: Duration) -> Row {
    let calls = |times: &Times| (times.put.len() + times.get_into.len()) as f64;
    let mut rates: Vec<f64> =
        rounds.iter().map(|round| round.iter().map(calls).sum::<f64>() / each.as_secs_f64()).collect();
    rates.sort_unstable_by(f64::total_cmp);
    let fairness = rounds.iter().map(|round| {
        let least = round.iter().map(calls).fold(f64::INFINITY, f64::min);
        least / round.iter().map(calls).fold(0.0, f64::max)
    });
    let fairness = fairness.fold(f64::INFINITY, f64::min);
    let (mut put, mut get_into) = (Vec::new(), Vec::new());
    for mut times in rounds.into_iter().flatten() {
        put.append(&mut times.put);
        get_into.append(&mut times.get_into);
    }
    let calls_per_s = rates.get(rates.len() / 2).copied().unwrap_or(f64::NAN);
    Row { clients, calls_per_s, fairness, put: Tail::of(put), get_into: Tail::of(get_into) }
}

struct Client {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    server: Server,
}

impl Client {
    fn start(socket: &Path, dir: &Path, number: usize, clients: usize) -> Result<Self> {
        let program = env::current_exe().during("this program's own file")?;
        let mut command = Command::new(program);
        command.arg(CLIENT).arg(socket).args([number.to_string(), clients.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut server = Server::start(CLIENT, dir, &mut command)?;
        let (stdin, stdout) = server.pipes().ok_or(Failure("a client has no stdin".into()))?;
        Ok(Client { stdin, stdout: BufReader::new(stdout), server })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).during("reading what a client says")?;
        if line.is_empty() { Err(self.server.last_words()) } else { Ok(line) }
    }

    fn tell(&mut self, line: impl std::fmt::Display) -> Result<()> {
        writeln!(self.stdin, "{line}").during("telling a client to go on")
    }
}

fn one_round(socket: &Path, dir: &Path, clients: usize, each: Duration) -> Result<Vec<Times>> {
    let started = (0..clients).map(|number| Client::start(socket, dir, number, clients));
    let mut all = started.collect::<Result<Vec<_>>>()?;
    // Ready when it has stored all of its keys.
    all.iter_mut().try_for_each(|client| client.line().map(drop))?;
    all.iter_mut().try_for_each(|client| client.tell(each.as_millis()))?;
    all.iter_mut().map(|client| serde_json::from_str(&client.line()?).during("what a client says")).collect()
}

/// Is a client: `haulier-compare scale-client SOCKET NUMBER CLIENTS`.
///
/// *Errors*: a call that fails, or a value that is not what was asked for.
pub fn client(mut args: impl Iterator<Item = String>) -> Result<()> {
    let mut next = || args.next().ok_or(Failure(format!("usage: {CLIENT} SOCKET NUMBER CLIENTS")));
    let client = connect(Path::new(&next()?))?;
    let number: usize = next()?.parse().during("the client's number")?;
    let clients: usize = next()?.parse().during("the number of clients")?;
    let mut work = Work { client, source: vec![0; VALUE], target: vec![0; VALUE], version: 0 };
    for key in 0..KEYS {
        work.put(number, key)?;
    }
    println!("ready");
    let mut line = String::new();
    io::stdin().read_line(&mut line).during("waiting for the others")?;
    let time = Duration::from_millis(line.trim().parse().during("how long to go on")?);

    let mut times = Times::default();
    let mut random = number as u64;
    let mut pick = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let start = Instant::now();
    while start.elapsed() < time {
        times.put.push(work.put(number, pick(KEYS))?);
        times.get_into.push(work.get_into(pick(clients), pick(KEYS))?);
    }
    println!("{}", serde_json::to_string(&times).during("writing JSON")?);
    Ok(())
}

struct Work {
    client: StoreClient<AnyDevice>,
    source: Vec<u8>,
    target: Vec<u8>,
    version: u64,
}

/// Bytes of the words that say which value it is, at both of its ends.
const MARK: usize = 16;

impl Work {
    fn put(&mut self, owner: usize, key: usize) -> Result<u32> {
        self.version += 1;
        let mark = mark(owner, key, self.version);
        self.source[..MARK].copy_from_slice(&mark);
        self.source[VALUE - MARK..].copy_from_slice(&mark);
        let name = name(owner, key);
        let start = Instant::now();
        let put = self.client.upsert(&name, &self.source);
        let time = ns(start);
        put.map(|_| time).during(format_args!("put of {name}"))
    }

    fn get_into(&mut self, owner: usize, key: usize) -> Result<u32> {
        let name = name(owner, key);
        let start = Instant::now();
        let got = self.client.get_into(&name, &mut self.target[..]);
        let time = ns(start);
        match got {
            Ok(len) if len == VALUE as u64 => {}
            // Its owner is not that far.
            Err(haulier::Error::NotFound) => return Ok(time),
            got => return Err(Failure(format!("get_into of {name}: {got:?}"))),
        }
        let (first, last) = (&self.target[..MARK], &self.target[VALUE - MARK..]);
        if first != last || first[..MARK / 2] != mark(owner, key, 0)[..MARK / 2] {
            return Err(Failure(format!("get_into of {name}: the bytes are not those of one put of it")));
        }
        Ok(time)
    }
}

fn ns(start: Instant) -> u32 {
    u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX)
}

fn name(owner: usize, key: usize) -> String {
    format!("scale/{owner}/{key}")
}

fn mark(owner: usize, key: usize, version: u64) -> [u8; MARK] {
    let mut mark = [0; MARK];
    mark[..4].copy_from_slice(&(owner as u32).to_le_bytes());
    mark[4..8].copy_from_slice(&(key as u32).to_le_bytes());
    mark[8..].copy_from_slice(&version.to_le_bytes());
    mark
}

impl Scale {
    /// A table in Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# Many clients at once\n\n\
             Ran on a {}. {} rounds of {} ms for each number of clients, in turns. Each client is a process that in turns \
             replaces a value of 4 KiB of its own and reads one of any client's, through one daemon, and checks it. The \
             daemon runs on the same {} cores, one thread for each client.\n\n\
             | clients | calls a second | to one client's | slowest by fastest | put, µs: median | p99 | p99.9 | \
             get_into, µs: median | p99 | p99.9 |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
            self.machine, self.rounds, self.each_ms, self.machine.cores
        );
        let alone = self.rows.first().map_or(f64::NAN, |row| row.calls_per_s);
        for Row { clients, calls_per_s, fairness, put, get_into } in &self.rows {
            let _ = write!(
                text,
                "| {clients} | {calls_per_s:.0} | {}× | {} |",
                short(calls_per_s / alone),
                short(*fairness)
            );
            for tail in [put, get_into] {
                let Tail { median_us, p99_us, p999_us, .. } = *tail;
                let _ = write!(text, " **{}** | {} | {} |", short(median_us), short(p99_us), short(p999_us));
            }
            text.push('\n');
        }
        text.push_str(
            "\nA put is a request, which keeps two threads busy at once: the client's and the daemon's. So one client alone \
             uses two cores while it puts and one while it gets, and n cores are used up by n/2 clients that put.\n",
        );
        text
    }

    /// Writes `scale.md` and `scale.json` to this folder.
    ///
    /// *Errors*: what the system says.
    pub fn write(&self, out: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).during("writing JSON")?;
        for (name, text) in [("scale.json", &json), ("scale.md", &self.markdown())] {
            let path = out.join(name);
            fs::write(&path, text).during(path.display())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_about_all_calls_of_all_clients() {
        let times = |put: &[u32], get_into: &[u32]| Times { put: put.into(), get_into: get_into.into() };
        let rounds = vec![
            vec![times(&[1000, 2000], &[500]), times(&[3000; 3], &[500; 3])],
            vec![times(&[1000; 5], &[500; 5]), times(&[1000; 5], &[500; 5])],
        ];
        let row = row(2, rounds, Duration::from_millis(500));
        assert_eq!((row.clients, row.calls_per_s, row.fairness), (2, 40.0, 0.5));
        assert_eq!((row.put.calls, row.put.median_us, row.put.p99_us), (15, 1.0, 3.0));
        assert_eq!((row.get_into.calls, row.get_into.p999_us), (14, 0.5));
    }
}
