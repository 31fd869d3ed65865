//! Tensors come back with the dtype, the shape and the bits that they had, however they lay and however they were divided.

use std::thread;

use backend_cpu::{
    CpuDevice,
    strict::{Op, StrictDevice},
};
use haulier::{
    Dtype, Error, NDIM_MAX, Payload, Put, Shard, StoreClient, Target, TensorMut, TensorRef, TensorSpec,
    hal::{Buffer, DeviceExt},
};
use haulier_tests::{
    actor, on_both_engines,
    process::{Actor, Serve},
    rig::{Rig, filled, peek},
    world::{Setup, World, bytes},
};

type Client = StoreClient<CpuDevice>;

/// Every dtype of safetensors.
const DTYPES: [Dtype; 22] = {
    use Dtype::*;
    [
        BOOL,
        F4,
        F6_E2M3,
        F6_E3M2,
        U8,
        I8,
        F8_E5M2,
        F8_E4M3,
        F8_E8M0,
        F8_E4M3FNUZ,
        F8_E5M2FNUZ,
        I16,
        U16,
        F16,
        BF16,
        I32,
        U32,
        F32,
        C64,
        F64,
        I64,
        U64,
    ]
};

/// Bits that a conversion on the way would lose: NaNs with payloads, quiet and signalling, of both signs; -0.0;
/// denormals; infinities; the extremes of integers.
const HARD: [u64; 12] = [
    0x7ff8_0000_dead_beef,
    0xfff0_0000_0000_0001,
    0x7fc0_beef_ffc0_0001,
    0x7f80_0001_ff80_0001,
    0x7e01_7c01_fe01_fc01,
    0x7fc1_7f81_ffc1_ff81,
    0x8000_0000_0000_0000,
    0x8000_8000_8080_8080,
    0x0000_0000_0000_0001,
    0x7ff0_0000_7f80_0000,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

fn hard_bytes(len: usize) -> Vec<u8> {
    HARD.iter().flat_map(|bits| bits.to_le_bytes()).cycle().take(len).collect()
}

fn payload<'a>(bytes: &'a [u8]) -> Payload<'a, CpuDevice> {
    bytes.into()
}

fn put_tensor(client: &Client, key: &str, dtype: Dtype, shape: &[u64], bytes: &[u8]) -> Put {
    client.put_tensor(key, &TensorRef::new(dtype, shape, bytes).unwrap()).unwrap()
}

/// The logical elements of a strided tensor, the slow and certain way.
fn gather(size: usize, shape: &[u64], strides: &[i64], offset: u64, storage: &[u8]) -> Vec<u8> {
    let mut places = vec![offset as i64];
    for (&n, &stride) in shape.iter().zip(strides) {
        places = places.iter().flat_map(|at| (0..n as i64).map(move |i| at + i * stride)).collect();
    }
    places.iter().flat_map(|&at| storage[at as usize * size..][..size].to_vec()).collect()
}

/// Shape, strides and offset, in elements, of tensors within a storage of 120 elements of 5 x 24.
const STRIDED: [(&str, &[u64], &[i64], u64); 12] = [
    ("transpose", &[24, 5], &[1, 24], 0),
    ("every second row", &[3, 24], &[48, 1], 0),
    ("every third column", &[5, 8], &[24, 3], 2),
    ("expand", &[4, 5, 3], &[0, 24, 0], 7),
    ("storage offset", &[2, 24], &[24, 1], 49),
    ("diagonal", &[5], &[25], 0),
    ("reversed", &[5, 24], &[-24, -1], 119),
    ("permuted", &[4, 5, 6], &[6, 24, 1], 0),
    ("a slice along the inner dimension", &[5, 7], &[24, 1], 11),
    ("one element", &[1, 1], &[999, -999], 60),
    ("a scalar", &[], &[], 119),
    ("nothing", &[0, 5], &[24, 1], 0),
];

/// All elements of a tensor of this shape, sliced out of the whole: what a shard of it must hold.
fn slice_along(whole: &[u8], size: usize, shape: &[u64], dim: usize, start: u64, len: u64) -> Vec<u8> {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i] as i64;
    }
    let mut part = shape.to_vec();
    part[dim] = len;
    gather(size, &part, &strides, start * strides[dim] as u64, whole)
}

on_both_engines! {
    every_dtype_comes_back_bit_for_bit: Setup::mib(16),
    dtypes_survive_device_memory: Setup::mib(16),
    a_value_that_is_not_that_tensor_is_told: Setup::mib(16),
    a_tensor_that_contradicts_itself_is_refused: Setup::mib(16),
    empty_and_scalar_tensors_are_values: Setup::mib(16),
    strided_tensors_are_stored_by_their_logical_values: Setup::mib(16),
    a_strided_target_gets_its_logical_values_and_nothing_else_is_touched: Setup::mib(16),
    strides_that_leave_the_storage_are_refused: Setup::mib(1),
    shards_are_got_back_however_they_were_put: Setup::mib(16),
    shards_that_do_not_belong_together_are_told: Setup::mib(16),
    shards_put_by_four_threads_make_one_tensor: Setup::mib(16),
}

/// P65.
fn every_dtype_comes_back_bit_for_bit(world: &World) {
    let client = world.client();
    // 768 elements: whole bytes for every dtype, a message and more than one for some.
    for dtype in DTYPES {
        for shape in [&[768][..], &[3, 256], &[2, 3, 4, 8, 4]] {
            let len = 768 * dtype.bitsize() / 8;
            // Of one byte an element, every code there is.
            let codes = (0..=255u8).cycle().take(len).collect();
            for (n, bits) in [hard_bytes(len), codes, bytes(9, len)].into_iter().enumerate() {
                let key = format!("{dtype}-{}-{n}", shape.len());
                assert_eq!(put_tensor(&client, &key, dtype, shape, &bits), Put::Stored);
                let spec = TensorSpec::new(dtype, shape);
                let owned = client.get_tensor(&key).unwrap();
                assert_eq!((&owned.spec, &owned.bytes), (&spec, &bits), "{key}");
                let view = client.view_tensor(&key).unwrap();
                assert_eq!((view.spec(), view.bytes()), (&spec, &bits[..]), "{key}");
                assert_eq!(client.tensor_spec(&key).unwrap(), spec);
                let mut target = vec![0xA5; len];
                client.get_tensor_into(&key, TensorMut::new(dtype, shape, &mut target).unwrap()).unwrap();
                assert_eq!(target, bits, "{key}");
                // The bytes alone are the value, without anything before or behind them.
                assert_eq!(client.get(&key).unwrap(), bits, "{key}");
            }
        }
    }
}

/// P65: from and to memory of the device, which goes by ipc where there is a daemon.
fn dtypes_survive_device_memory(world: &World) {
    let client = world.client();
    for dtype in [Dtype::BF16, Dtype::F8_E4M3, Dtype::F8_E5M2, Dtype::F32, Dtype::C64, Dtype::BOOL] {
        let bits = hard_bytes(256 * dtype.bitsize() / 8);
        let mut source = client.device().buffer(bits.len()).unwrap();
        source.allocation_mut().unwrap().write(0, &bits).unwrap();
        let key = format!("{dtype}");
        client.put_tensor(&key, &TensorRef::new(dtype, &[16, 16], &source).unwrap()).unwrap();
        let mut target = client.device().buffer(bits.len()).unwrap();
        client.get_tensor_into(&key, TensorMut::new(dtype, &[16, 16], &mut target).unwrap()).unwrap();
        let mut back = vec![0; bits.len()];
        target.allocation().read(0, &mut back).unwrap();
        assert_eq!(back, bits, "{dtype}");
        assert_eq!(client.tensor_spec(&key).unwrap(), TensorSpec::new(dtype, [16, 16]));
    }
}

/// P66: what is no tensor, or another one than the target says, is told and touches nothing.
fn a_value_that_is_not_that_tensor_is_told(world: &World) {
    let client = world.client();
    client.put("plain", &[0; 24]).unwrap();
    for verdict in [
        client.get_tensor("plain").map(drop),
        client.view_tensor("plain").map(drop),
        client.tensor_spec("plain").map(drop),
    ] {
        assert!(matches!(verdict, Err(Error::InvalidTensor { .. })), "{verdict:?}");
    }
    assert_eq!(client.get("plain").unwrap(), [0; 24]);
    put_tensor(&client, "t", Dtype::F32, &[2, 3], &[7; 24]);
    for (key, dtype, shape) in [
        ("t", Dtype::I32, &[2, 3][..]),
        ("t", Dtype::F32, &[3, 2]),
        ("t", Dtype::F32, &[6]),
        ("t", Dtype::U8, &[24]),
        ("plain", Dtype::U8, &[24]),
    ] {
        let mut target = vec![0xEE; 24];
        let filled = client.get_tensor_into(key, TensorMut::new(dtype, shape, &mut target).unwrap());
        assert!(matches!(filled, Err(Error::InvalidTensor { .. })), "{key} {dtype} {shape:?}: {filled:?}");
        assert_eq!(target, [0xEE; 24]);
    }
    assert!(matches!(client.get_tensor("absent"), Err(Error::NotFound)));
    // Replaced by plain bytes, it is no tensor any more.
    client.upsert("t", &[1; 24]).unwrap();
    assert!(matches!(client.get_tensor("t"), Err(Error::InvalidTensor { .. })));
}

/// P66: a description that contradicts its bytes is refused before anything is sent.
fn a_tensor_that_contradicts_itself_is_refused(world: &World) {
    let client = world.client();
    let new =
        |dtype, shape: &[u64], len: usize| TensorRef::<CpuDevice>::new(dtype, shape, &vec![0; len]).map(drop);
    for (dtype, shape, len) in [
        (Dtype::F32, &[2, 3][..], 25),
        (Dtype::F32, &[2, 3], 20),
        (Dtype::F32, &[u64::MAX, 2], 8),
        (Dtype::U8, &[1 << 32, 1 << 32], 0),
        (Dtype::U8, &[1; NDIM_MAX + 1], 1),
        (Dtype::F4, &[3], 1),
        (Dtype::U8, &[], 0),
    ] {
        assert!(
            matches!(new(dtype, shape, len), Err(Error::InvalidTensor { .. })),
            "{dtype} {shape:?} {len}"
        );
    }
    let most = [1; NDIM_MAX];
    assert_eq!(put_tensor(&client, "most dimensions", Dtype::U8, &most, &[7]), Put::Stored);
    assert_eq!(client.get_tensor("most dimensions").unwrap().spec.shape, most);
    let huge = [u64::MAX, 0, u64::MAX];
    assert_eq!(put_tensor(&client, "empty and huge", Dtype::F64, &huge, &[]), Put::Stored);
    assert_eq!(client.get_tensor("empty and huge").unwrap().spec.shape, huge);
}

/// P67.
fn empty_and_scalar_tensors_are_values(world: &World) {
    let client = world.client();
    let device = client.device().buffer(4096).unwrap();
    let shapes: [(&str, &[u64]); 4] = [("a", &[0]), ("b", &[0, 7]), ("c", &[3, 0, 2]), ("scalar", &[])];
    let scalar = 1.5f32.to_le_bytes();
    let bytes_of = |shape: &[u64]| if shape.is_empty() { &scalar[..] } else { &[] };
    for (key, shape) in shapes {
        assert_eq!(put_tensor(&client, key, Dtype::F32, shape, bytes_of(shape)), Put::Stored);
    }
    // In a batch among others, and with a part of device memory that has no bytes.
    let full = bytes(3, 5000);
    let mut batch: Vec<(String, TensorRef<'_, CpuDevice>)> = Vec::new();
    for (key, shape) in shapes {
        batch.push((format!("batch-{key}"), TensorRef::new(Dtype::F32, shape, bytes_of(shape)).unwrap()));
        batch.push((format!("batch-full-{key}"), TensorRef::new(Dtype::U8, &[5000], &full).unwrap()));
        if !shape.is_empty() {
            let part = Payload::part(&device, 4096, 0).unwrap();
            batch.push((format!("device-{key}"), TensorRef::new(Dtype::F32, shape, part).unwrap()));
        }
    }
    let items: Vec<_> = batch.iter().map(|(key, tensor)| (key.as_str(), tensor.clone())).collect();
    for (verdict, (key, _)) in client.batch_put_tensor(&items).into_iter().zip(&batch) {
        assert_eq!(verdict.unwrap(), Put::Stored, "{key}");
    }
    for (prefix, skip) in [("", false), ("batch-", false), ("device-", true)] {
        for (key, shape) in shapes.into_iter().filter(|(_, shape)| !(skip && shape.is_empty())) {
            let key = format!("{prefix}{key}");
            let owned = client.get_tensor(&key).unwrap();
            assert_eq!((owned.spec.dtype, &owned.spec.shape[..]), (Dtype::F32, shape), "{key}");
            assert_eq!(owned.bytes, bytes_of(shape), "{key}");
            let mut target = bytes_of(shape).to_vec();
            target.fill(0xEE);
            client.get_tensor_into(&key, TensorMut::new(Dtype::F32, shape, &mut target).unwrap()).unwrap();
            assert_eq!(target, bytes_of(shape), "{key}");
            assert_eq!(client.size(&key).unwrap(), bytes_of(shape).len() as u64);
        }
    }
    assert_eq!(client.get_tensor("batch-full-scalar").unwrap().bytes, full);
    // Another shape without bytes is another tensor all the same.
    let other = client.get_tensor_into("a", TensorMut::new(Dtype::F32, &[7, 0], &mut [][..]).unwrap());
    assert!(matches!(other, Err(Error::InvalidTensor { .. })), "{other:?}");
}

/// P68.
fn strided_tensors_are_stored_by_their_logical_values(world: &World) {
    let client = world.client();
    for (dtype, size) in [(Dtype::U8, 1), (Dtype::BF16, 2), (Dtype::F32, 4), (Dtype::C64, 8)] {
        let storage = bytes(size as u64, 120 * size);
        let mut buffer = client.device().buffer(120 * size).unwrap();
        buffer.allocation_mut().unwrap().write(0, &storage).unwrap();
        let mut batch = Vec::new();
        for (name, shape, strides, offset) in STRIDED {
            let wanted = gather(size, shape, strides, offset, &storage);
            let heap = TensorRef::strided(dtype, shape, strides, offset, &storage).unwrap();
            let device = TensorRef::strided(dtype, shape, strides, offset, &buffer).unwrap();
            for (from, tensor) in [("heap", &heap), ("device", &device)] {
                let key = format!("{dtype} {name} {from}");
                assert_eq!(client.put_tensor(&key, tensor).unwrap(), Put::Stored);
                let owned = client.get_tensor(&key).unwrap();
                assert_eq!((&owned.spec.shape[..], &owned.bytes), (shape, &wanted), "{key}");
            }
            batch.push((format!("{dtype} {name} batch"), heap, wanted));
        }
        let items: Vec<_> = batch.iter().map(|(key, tensor, _)| (key.as_str(), tensor.clone())).collect();
        for (verdict, (key, _, wanted)) in client.batch_put_tensor(&items).into_iter().zip(&batch) {
            assert_eq!(verdict.unwrap(), Put::Stored, "{key}");
            assert_eq!(client.get(key).unwrap(), *wanted, "{key}");
        }
    }
}

/// P68: the other way, and bytes between the elements stay as they are.
fn a_strided_target_gets_its_logical_values_and_nothing_else_is_touched(world: &World) {
    let client = world.client();
    for (name, shape, strides, offset) in STRIDED {
        if name == "expand" {
            continue; // One place for many elements: see below.
        }
        let count: u64 = shape.iter().product();
        let values = bytes(5, count as usize * 4);
        put_tensor(&client, name, Dtype::F32, shape, &values);
        let mut storage = vec![0xEE; 480];
        let target = TensorMut::strided(Dtype::F32, shape, strides, offset, &mut storage).unwrap();
        client.get_tensor_into(name, target).unwrap();
        let wanted = untouched_with(&values, shape, strides, offset);
        assert_eq!(storage, wanted, "{name}");

        let mut buffer: Buffer<CpuDevice> = client.device().buffer(480).unwrap();
        buffer.allocation_mut().unwrap().write(0, &[0xEE; 480]).unwrap();
        let target = TensorMut::strided(Dtype::F32, shape, strides, offset, &mut buffer).unwrap();
        client.get_tensor_into(name, target).unwrap();
        let mut storage = vec![0; 480];
        buffer.allocation().read(0, &mut storage).unwrap();
        assert_eq!(storage, wanted, "{name}");
    }
    let mut storage = vec![0xEE; 480];
    let wrong = TensorMut::strided(Dtype::F32, &[5, 24], &[1, 5], 0, &mut storage).unwrap();
    let verdict = client.get_tensor_into("transpose", wrong);
    assert!(matches!(verdict, Err(Error::InvalidTensor { .. })), "{verdict:?}");
    assert_eq!(storage, [0xEE; 480]);
}

/// P68: what leaves its storage is refused.
fn strides_that_leave_the_storage_are_refused(_world: &World) {
    let storage = [0u8; 480];
    for (shape, strides, offset) in [
        (&[5u64, 24][..], &[24i64, 1][..], 1u64),
        (&[6, 24], &[24, 1], 0),
        (&[5, 24], &[25, 1], 0),
        (&[2], &[-1], 0),
        (&[1], &[1], 120),
        (&[1], &[1], u64::MAX),
        (&[u64::MAX], &[i64::MAX], 0),
        (&[u64::MAX, u64::MAX], &[0, 0], 0),
        (&[2, 2], &[1], 0),
    ] {
        let tensor = TensorRef::<CpuDevice>::strided(Dtype::F32, shape, strides, offset, &storage);
        assert!(
            matches!(tensor, Err(Error::InvalidTensor { .. })),
            "{shape:?} {strides:?} {offset}: {tensor:?}"
        );
        let mut storage = storage;
        let tensor = TensorMut::<CpuDevice>::strided(Dtype::F32, shape, strides, offset, &mut storage[..]);
        assert!(
            matches!(tensor, Err(Error::InvalidTensor { .. })),
            "{shape:?} {strides:?} {offset}: {tensor:?}"
        );
    }
    let halves = TensorRef::<CpuDevice>::strided(Dtype::F4, &[4, 4], &[1, 4], 0, &storage);
    assert!(matches!(halves, Err(Error::NonContiguous)), "{halves:?}");
}

/// A tensor put in shards along any dimension, divided evenly or not, is got back whole and in any other division.
fn shards_are_got_back_however_they_were_put(world: &World) {
    let client = world.client();
    let shape = [5u64, 7, 6];
    let whole = bytes(1, 5 * 7 * 6 * 2);
    let tensor = TensorRef::new(Dtype::BF16, &shape, &whole).unwrap();
    for (dim, world) in [(0u32, 1u32), (0, 2), (0, 5), (0, 8), (1, 3), (1, 7), (2, 4), (2, 6)] {
        let key = format!("w-{dim}-{world}");
        let put = client.put_sharded(&key, &tensor, dim, world).unwrap();
        assert!(put.len() == world as usize && put.iter().all(|v| matches!(v, Ok(Put::Stored))), "{put:?}");
        let got = client.get_sharded(&key).unwrap();
        assert_eq!((got.spec.dtype, &got.spec.shape[..]), (Dtype::BF16, &shape[..]), "{key}");
        assert_eq!(got.bytes, whole, "{key}");
        for (other, readers) in [(0u32, 3u32), (1, 2), (1, 4), (2, 1), (2, 5), (0, 9)] {
            let mut covered = 0;
            for rank in 0..readers {
                let shard = Shard { dim: other, rank, world: readers, full: shape[other as usize] };
                let (start, len) = shard.range();
                let part = client.get_shard(&key, other, rank, readers).unwrap();
                assert_eq!(part.spec.shard, Some(shard));
                assert_eq!(part.spec.shape[other as usize], len);
                let wanted = slice_along(&whole, 2, &shape, other as usize, start, len);
                assert_eq!(part.bytes, wanted, "{key} as {rank} of {readers} along {other}");
                covered += len;
            }
            assert_eq!(covered, shape[other as usize]);
        }
        let again = client.put_sharded(&key, &tensor, dim, world).unwrap();
        assert!(again.iter().all(|v| matches!(v, Ok(Put::AlreadyExists))), "{again:?}");
        assert_eq!(client.remove_sharded(&key).unwrap(), u64::from(world));
        assert!(matches!(client.get_sharded(&key), Err(Error::NotFound)));
    }
}

/// A sharded tensor with a shard missing, or with one of another tensor, is not made up.
fn shards_that_do_not_belong_together_are_told(world: &World) {
    let client = world.client();
    let whole = bytes(1, 8 * 6 * 4);
    let tensor = TensorRef::new(Dtype::F32, &[8, 6], &whole).unwrap();
    let part = |rank: u64, rows: u64| payload(&whole[(rank * 48) as usize..][..(rows * 24) as usize]);
    let shard = |rank, world, full| Shard { dim: 0, rank, world, full };
    client.put_sharded("w", &tensor, 0, 4).unwrap().into_iter().for_each(|verdict| assert!(verdict.is_ok()));

    assert!(client.remove("w@shard2").unwrap());
    assert!(matches!(client.get_sharded("w"), Err(Error::NotFound)));
    assert_eq!(client.get_shard("w", 0, 0, 2).unwrap().bytes, whole[..96], "shard 2 is not needed for this");
    assert!(matches!(client.get_shard("w", 0, 1, 2), Err(Error::NotFound)));

    for (dtype, shape, place) in [
        (Dtype::I32, [2, 6], shard(2, 4, 8)),
        (Dtype::F32, [2, 6], shard(2, 5, 10)),
        (Dtype::F32, [3, 4], shard(2, 4, 12)),
    ] {
        let foreign = TensorRef::new(dtype, &shape, part(2, 2)).unwrap();
        client.upsert_shard("w", foreign, place).unwrap();
        let got = client.get_sharded("w");
        assert!(matches!(got, Err(Error::InvalidTensor { .. })), "{got:?}");
    }
    client.upsert_tensor("w@shard2", &TensorRef::new(Dtype::F32, &[2, 6], part(2, 2)).unwrap()).unwrap();
    assert!(
        matches!(client.get_sharded("w"), Err(Error::InvalidTensor { .. })),
        "shard 2 says it is no shard"
    );
    let back = TensorRef::new(Dtype::F32, &[2, 6], part(2, 2)).unwrap();
    assert_eq!(client.upsert_shard("w", back, shard(2, 4, 8)).unwrap(), Put::Replaced);
    assert_eq!(client.get_sharded("w").unwrap().bytes, whole);

    // Nonsense is refused before anything is stored.
    let rows = TensorRef::new(Dtype::F32, &[2, 6], part(0, 2)).unwrap();
    for place in [shard(4, 4, 8), shard(0, 3, 8), shard(0, 0, 8), Shard { dim: 2, ..shard(0, 4, 8) }] {
        let verdict = client.put_shard("nonsense", rows.clone(), place);
        assert!(matches!(verdict, Err(Error::InvalidTensor { .. })), "{place:?}: {verdict:?}");
    }
    for (dim, rank, world) in [(2, 0, 2), (0, 2, 2), (0, 0, 0), (u32::MAX, 0, 1)] {
        let got = client.get_shard("w", dim, rank, world);
        assert!(matches!(got, Err(Error::InvalidTensor { .. })), "{dim} {rank} {world}: {got:?}");
    }
    assert!(client.list("nonsense").unwrap().is_empty());
}

/// Each rank puts its own shard at the same time; every reader sees the whole.
fn shards_put_by_four_threads_make_one_tensor(world: &World) {
    const RANKS: u32 = 4;
    let (full, columns) = (10u64, 1000u64);
    let whole = bytes(8, (full * columns * 4) as usize);
    let clients: Vec<Client> = (0..RANKS).map(|_| world.client()).collect();
    thread::scope(|scope| {
        for (rank, client) in (0..RANKS).zip(&clients) {
            let whole = &whole;
            scope.spawn(move || {
                let shard = Shard { dim: 0, rank, world: RANKS, full };
                let (start, rows) = shard.range();
                let part = &whole[(start * columns * 4) as usize..][..(rows * columns * 4) as usize];
                let tensor = TensorRef::new(Dtype::F32, &[rows, columns], part).unwrap();
                assert_eq!(client.put_shard("w", tensor, shard).unwrap(), Put::Stored);
            });
        }
    });
    for client in &clients {
        assert_eq!(client.get_sharded("w").unwrap().bytes, whole);
    }
}

/// 480 bytes of 0xEE with the values at the places of a strided tensor of four-byte elements.
fn untouched_with(values: &[u8], shape: &[u64], strides: &[i64], offset: u64) -> Vec<u8> {
    let mut storage = vec![0xEE; 480];
    let numbers: Vec<u8> = (0..120u64).flat_map(u64::to_le_bytes).collect();
    for (place, value) in gather(8, shape, strides, offset, &numbers).chunks(8).zip(values.chunks(4)) {
        let at = u64::from_le_bytes(place.try_into().unwrap()) as usize * 4;
        storage[at..at + 4].copy_from_slice(value);
    }
    storage
}

/// Ranks are processes.
#[test]
fn shards_put_by_four_processes_make_one_tensor() {
    let daemon = Serve::pool("16MiB").start();
    let mut ranks: Vec<Actor> = (0..4).map(|_| actor!(daemon.socket())).collect();
    for (rank, actor) in ranks.iter_mut().enumerate() {
        actor.tell(format_args!("put-shard w 6 {rank} 4"));
    }
    for actor in &mut ranks {
        assert_eq!(actor.answer().as_deref(), Some("Stored"));
    }
    drop(ranks);
    let client = daemon.client();
    let whole = client.get_sharded("w").unwrap();
    assert_eq!((whole.spec.dtype, &whole.spec.shape[..]), (Dtype::F32, &[10, 6][..]));
    assert_eq!(whole.bytes, bytes(6, 240));
    let columns = client.get_shard("w", 1, 1, 4).unwrap();
    assert_eq!(columns.bytes, slice_along(&bytes(6, 240), 4, &[10, 6], 1, 2, 2));
}

/// A description as it is stored, made by hand.
fn description(magic: u8, version: u8, dtype: &str, shape: &[u64], shard: &[u8]) -> Vec<u8> {
    let mut meta = vec![magic, version];
    varint(&mut meta, dtype.len() as u64);
    meta.extend(dtype.as_bytes());
    varint(&mut meta, shape.len() as u64);
    shape.iter().for_each(|&n| varint(&mut meta, n));
    meta.extend(shard);
    meta
}

/// A number as postcard writes it: seven bits a byte, the lowest first.
fn varint(to: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        to.push(n as u8 | 0x80);
        n >>= 7;
    }
    to.push(n as u8);
}

proptest::proptest! {
    #![proptest_config(proptest::test_runner::Config { failure_persistence: None, ..Default::default() })]

    /// P66: no description panics, and one that is accepted describes its bytes.
    #[test]
    fn an_accepted_description_describes_its_bytes(
        cut in 0usize..40,
        flips in proptest::collection::vec((0usize..40, proptest::num::u8::ANY), 0..4),
        len in 0u64..64,
    ) {
        let mut meta = description(b'T', 1, "F32", &[2, 3], &[1, 0, 1, 2, 4]);
        for (at, byte) in flips {
            if let Some(place) = meta.get_mut(at) {
                *place = byte;
            }
        }
        meta.truncate(cut.max(1));
        if let Ok(spec) = TensorSpec::decode(&meta, len) {
            proptest::prop_assert_eq!(spec.bytes().unwrap(), len);
        }
    }
}

/// P67: on a device that refuses nonsense, no call is made about memory that has no bytes.
#[test]
fn empty_tensors_cost_no_driver_call() {
    let rig = Rig::new();
    let client = rig.client(0);
    let values = bytes(1, 70_000);
    let mut buffer = filled(client.device(), &values);
    let calls = || {
        let of = |log: &backend_cpu::strict::Log| {
            [Op::Export, Op::Import, Op::Register, Op::Allocate, Op::Copy, Op::Locate].map(|op| log.count(op))
        };
        (of(rig.here().log()), of(rig.there().log()))
    };
    let before = calls();
    let shapes: [(&str, &[u64]); 3] = [("a", &[0]), ("b", &[0, 7]), ("c", &[3, 0, 2])];
    for (key, shape) in shapes {
        // At the start, inside, and at the end of an allocation.
        for offset in [0, 100, 70_000] {
            let part = Payload::part(&buffer, offset, 0).unwrap();
            let tensor = TensorRef::new(Dtype::F32, shape, part).unwrap();
            client.upsert_tensor(key, &tensor).unwrap();
        }
        assert_eq!(client.get_tensor(key).unwrap().spec.shape, shape);
        let part = Target::part(&mut buffer, 100, 0).unwrap();
        client.get_tensor_into(key, TensorMut::new(Dtype::F32, shape, part).unwrap()).unwrap();
    }
    assert_eq!(calls(), before, "export, import, register, allocate, copy, locate");

    // Among others that go by ipc: one export for the one allocation that has bytes.
    let none = || TensorRef::new(Dtype::F32, &[0, 3], Payload::part(&buffer, 8, 0).unwrap()).unwrap();
    let full = || TensorRef::new(Dtype::U8, &[70_000], &buffer).unwrap();
    let put = client.batch_put_tensor(&[("d", none()), ("e", full()), ("f", none()), ("g", full())]);
    assert!(put.iter().all(|verdict| matches!(verdict, Ok(Put::Stored))), "{put:?}");
    assert_eq!(rig.here().log().count(Op::Export), 1);
    assert_eq!(rig.stored("ipc"), 2);
    assert_eq!(client.get("e").unwrap(), values);
    assert_eq!((client.get_tensor("d").unwrap().spec.shape, client.size("f").unwrap()), (vec![0, 3], 0));
}

/// P68: where the host cannot gather, a strided tensor is refused and nothing is stored; one without gaps is none.
#[test]
fn a_strided_tensor_in_device_memory_is_refused_and_never_copied_raw() {
    let rig = Rig::new();
    let client = rig.client(0);
    let values = bytes(1, 480);
    let mut buffer = filled(client.device(), &values);
    for (name, shape, strides, offset) in STRIDED {
        let tensor = TensorRef::<StrictDevice>::strided(Dtype::F32, shape, strides, offset, &buffer).unwrap();
        let contiguous = ["storage offset", "one element", "a scalar", "nothing"].contains(&name);
        let verdicts = [
            client.put_tensor(name, &tensor),
            client.batch_upsert_tensor(&[(name, tensor.clone())]).remove(0),
        ];
        for verdict in verdicts {
            match verdict {
                Ok(_) if contiguous => {
                    assert_eq!(
                        client.get(name).unwrap(),
                        gather(4, shape, strides, offset, &values),
                        "{name}"
                    );
                }
                Err(Error::NonContiguous) if !contiguous => assert!(!client.exists(name).unwrap(), "{name}"),
                verdict => panic!("{name}: {verdict:?}"),
            }
        }
    }
    let host = TensorRef::new(Dtype::F32, &[24, 5], &values).unwrap();
    client.put_tensor("whole", &host).unwrap();
    let target = TensorMut::strided(Dtype::F32, &[24, 5], &[1, 24], 0, &mut buffer).unwrap();
    let verdict = client.get_tensor_into("whole", target);
    assert!(matches!(verdict, Err(Error::NonContiguous)), "{verdict:?}");
    assert_eq!(peek(rig.here(), buffer.region()), values);
}

/// A tensor in device memory of a daemon's client goes by ipc, contiguous parts of larger ones too.
#[test]
fn contiguous_parts_of_device_memory_go_by_ipc() {
    let world = World::node(&Setup::mib(16));
    let client = world.client();
    let storage = bytes(2, 100 * 1000);
    let mut buffer = client.device().buffer(storage.len()).unwrap();
    buffer.allocation_mut().unwrap().write(0, &storage).unwrap();
    let rows = TensorRef::strided(Dtype::U8, &[10, 1000], &[1000, 1], 5000, &buffer).unwrap();
    let before = counter(&client, "op=\"put\"", "path=\"ipc\"");
    assert_eq!(client.put_tensor("rows", &rows).unwrap(), Put::Stored);
    assert_eq!(counter(&client, "op=\"put\"", "path=\"ipc\"") - before, 1.0);
    assert_eq!(client.get("rows").unwrap(), storage[5000..15_000]);
}

/// The sum of the counters of operations that bear both labels.
fn counter(client: &Client, a: &str, b: &str) -> f64 {
    let text = client.metrics().unwrap();
    let rows = text
        .lines()
        .filter(|row| row.starts_with("haulier_operations_total") && row.contains(a) && row.contains(b));
    rows.map(|row| row.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}
