//! Legacy handles between two processes.

use crate::process::told;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Handle {
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    Handle(std::array::from_fn(|at| byte(at * 2)))
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Handle([u8; 64]);

driver_tests! {
    fn another_process_reads_and_writes_the_allocation[](d) {
        d.on(1);
        if let Some(handle) = told() {
            let handle = unhex(&handle);
            let open = |flags: u32| {
                let mut pointer = 0u64;
                (cu!(d, cuIpcOpenMemHandle_v2(&raw mut pointer, handle, flags)), pointer)
            };
            assert_eq!(open(0).0, 1);
            let (status, pointer) = open(1);
            assert_eq!((status, d.control.peek(pointer + 100, 2)), (0, Ok(vec![7, 7])));
            // Opened again it is counted, and has the same address.
            assert_eq!((open(1), d.control.open_imports()), ((0, pointer), Ok(1)));
            ok!(d, cuMemsetD8_v2(pointer, 9u8, 50usize));
            ok!(d, cuStreamSynchronize(0u64));
            assert_eq!(d.attributes([2, 9, 10, 12], pointer), Ok([2, 1, 0, 4096]));
            let mut again = [0u8; 64];
            assert_eq!(cu!(d, cuIpcGetMemHandle(again.as_mut_ptr(), pointer)), 1);
            assert_eq!(cu!(d, cuMemFree_v2(pointer)), 1);
            ok!(d, cuIpcCloseMemHandle(pointer));
            ok!(d, cuIpcCloseMemHandle(pointer));
            assert_eq!((cu!(d, cuIpcCloseMemHandle(pointer)), d.control.open_imports()), (1, Ok(0)));
            // The other device is another one.
            d.on(0);
            assert_ne!(open(1).0, 0);
            return;
        }
        let pointer = d.allocate(4096);
        d.control.poke(pointer, &[7; 4096]).unwrap();
        // An interior pointer gives the allocation's handle.
        let [mut handle, mut inside] = [[0u8; 64]; 2];
        ok!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), pointer));
        ok!(d, cuIpcGetMemHandle(inside.as_mut_ptr(), pointer + 1000));
        assert_eq!(handle, inside);
        d.peer(&hex(&handle), &[]);
        assert_eq!(d.control.peek(pointer + 48, 4), Ok(vec![9, 9, 7, 7]));
        // In the exporter's own process it does not open.
        let mut own = 0u64;
        assert_eq!(cu!(d, cuIpcOpenMemHandle_v2(&raw mut own, Handle(handle), 1u32)), 201);
        // Memory of the other device needs that device current.
        d.on(0);
        assert_eq!(cu!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), pointer)), 400);
    }

    fn a_handle_of_freed_memory_or_of_another_machine_does_not_open[](d) {
        d.on(0);
        if let Some(handle) = told() {
            let mut pointer = 0u64;
            assert_eq!(cu!(d, cuIpcOpenMemHandle_v2(&raw mut pointer, unhex(&handle), 1u32)), 205);
            assert_eq!(cu!(d, cuIpcOpenMemHandle_v2(&raw mut pointer, Handle([3; 64]), 1u32)), 1);
            return;
        }
        let pointer = d.allocate(4096);
        let mut handle = [0u8; 64];
        ok!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), pointer));
        d.peer(&hex(&handle), &[("HAULIER_SIM_SEED", "1")]);
        ok!(d, cuMemFree_v2(pointer));
        let _reused = d.allocate(4096);
        d.peer(&hex(&handle), &[]);
    }

    fn the_same_card_has_another_ordinal_in_the_other_process
        [HAULIER_SIM_DEVICES = "4", CUDA_VISIBLE_DEVICES = "2"](d) {
        d.on(if told().is_some() { 2 } else { 0 });
        if let Some(handle) = told() {
            let mut pointer = 0u64;
            ok!(d, cuIpcOpenMemHandle_v2(&raw mut pointer, unhex(&handle), 1u32));
            assert_eq!(d.attributes([9], pointer), Ok([2]));
            return;
        }
        let mut handle = [0u8; 64];
        ok!(d, cuIpcGetMemHandle(handle.as_mut_ptr(), d.allocate(64)));
        d.peer(&hex(&handle), &[("CUDA_VISIBLE_DEVICES", "0,1,2,3")]);
    }
}
