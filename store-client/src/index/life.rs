//! The life word: whether the daemon that writes an index lives, told without a system call.
//!
//! It is a robust futex (`set_robust_list(2)`), the one entry of the list of a thread that does nothing else. When that
//! thread ends, by `kill -9` of the daemon too, the kernel walks its list and sets `FUTEX_OWNER_DIED` in each word that holds
//! the thread's id. It does so when the thread gives up its memory (`exit_mm`), which comes before it gives up its files
//! (`exit_files`); and the process' files are closed by the last of its threads to do so. So nobody finds the socket
//! closed or the lock free while the word still says that the daemon lives.

use std::{
    ffi::{c_long, c_void},
    io,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
};

/// Set by the kernel, or by the daemon itself.
const OWNER_DIED: u32 = 0x4000_0000;

/// Whether the daemon lives whose index is mapped at `base`.
///
/// # Safety
/// An index must be mapped there.
pub(crate) unsafe fn is_alive(base: NonNull<u8>) -> bool {
    // SAFETY: the caller promises it; the word is only ever accessed atomically, by the kernel too.
    let word = unsafe { base.cast::<AtomicU32>().as_ref() }.load(Ordering::Acquire);
    word != 0 && word & OWNER_DIED == 0
}

/// Says that the daemon lives until this is dropped or the process ends, whichever comes first.
#[derive(Debug)]
pub(crate) struct Life {
    end: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// As the kernel reads it: `struct robust_list_head`.
#[repr(C)]
struct Head {
    /// The first entry, or the head itself.
    first: *const c_void,
    /// From an entry to its futex.
    offset: c_long,
    pending: *const c_void,
}

impl Life {
    /// Begins, in the index that is mapped at `base`, for writing, for as long as `keep` lives.
    ///
    /// *Errors*: where no thread can be had, or no robust futex.
    ///
    /// # Safety
    /// An index must be mapped there, for writing.
    pub(crate) unsafe fn begin(base: NonNull<u8>, keep: Arc<dyn Send + Sync>) -> io::Result<Self> {
        struct Word(NonNull<AtomicU32>);
        // SAFETY: the word is atomic.
        unsafe impl Send for Word {}
        let word = Word(base.cast());
        let (end, ended) = mpsc::channel();
        let (tell, begun) = mpsc::channel();
        let live = move || {
            let Word(word) = { word };
            // SAFETY: the index is mapped while `keep` lives, which is until after the last use.
            let life = unsafe { word.as_ref() };
            // An entry is the link to the next one, here to the head; its futex lies at a fixed distance from it.
            let mut entry: *const c_void = ptr::null();
            let link = &raw mut entry;
            let mut head = Head {
                first: link.cast(),
                offset: (word.as_ptr().addr() as isize).wrapping_sub(link.addr() as isize) as c_long,
                pending: ptr::null(),
            };
            let at = &raw mut head;
            // SAFETY: both are variables of this function, which outlive the thread's use of the list.
            unsafe { *link = at.cast_const().cast() };
            // The list of the C library goes: this thread locks no robust mutex.
            // SAFETY: the head and its entry stay on this thread's stack, which the kernel leaves in place until the
            // thread has ended.
            let outcome = unsafe { libc::syscall(libc::SYS_set_robust_list, at, size_of::<Head>()) };
            if outcome != 0 {
                let _ = tell.send(Err(io::Error::last_os_error()));
                return;
            }
            life.store(rustix::thread::gettid().as_raw_nonzero().get() as u32, Ordering::Release);
            if tell.send(Ok(())).is_ok() {
                // An error says that the other end is gone, and means the same.
                let _ = ended.recv();
            }
            life.store(OWNER_DIED, Ordering::SeqCst);
            // SAFETY: no list at all is what a new thread has.
            unsafe { libc::syscall(libc::SYS_set_robust_list, ptr::null::<Head>(), size_of::<Head>()) };
            // Used until here.
            std::hint::black_box((&raw const entry, &raw const head));
            drop(keep);
        };
        let thread = thread::Builder::new().name("haulier-life".into()).spawn(live)?;
        begun.recv().unwrap_or_else(|_| Err(io::Error::other("the thread has ended")))?;
        Ok(Life { end: Some(end), thread: Some(thread) })
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}
