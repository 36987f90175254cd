/*
 * Stands in for Pyxis on a private Slurm: takes srun's --container-… options and does with a squashfs file what Pyxis
 * and Enroot do. container_plugin.md lists where it differs. It mounts as root: for tests, never for a cluster.
 *
 * Once per node and step, before the tasks are forked, a child of slurmstepd builds the container's namespaces, becomes
 * a login shell in it and stops. slurmstepd opens the namespaces, reads the shell's environment and ends the child.
 * Each task enters by these descriptors. Nothing else holds the mounts: what ends the step, even SIGKILL, undoes them.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/securebits.h>
#include <pwd.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#pragma GCC diagnostic ignored "-Wunused-parameter" /* Slurm says what a hook takes */

SPANK_PLUGIN(container_plugin, 1);

enum { IMAGE, MOUNTS, WORKDIR, ENV, NAME, TEXTS, HOME = TEXTS, REMAP_ROOT, WRITABLE, OPTIONS };
static char *texts[TEXTS];
static int flags[OPTIONS] = {[HOME] = -1, [REMAP_ROOT] = -1, [WRITABLE] = -1}; /* -1: not said, which is no */

enum { OWN = 5, MOST = 1000 }; /* the container's own come first, then the user's */
static struct bind { const char *source, *target; int read_only, tree; } binds[MOST + 1] = {
    {"/proc", "/proc", 0, 0}, {"/sys", "/sys", 1, 0}, {"/dev", "/dev", 0, 0},
    {"/etc/hosts", "/etc/hosts", 1, 0}, {"/etc/resolv.conf", "/etc/resolv.conf", 1, 0}};
static int bound = OWN;

static char folder[PATH_MAX] = "/run", home[PATH_MAX] = "/", failure[4096], *environment[MOST + 1];
static int variables, user_space, mount_space, report; /* report: in the child, a pipe to slurmstepd */
static unsigned uid, gid;

/* Say why there is no container; in the child that is the end. */
__attribute__((format(printf, 1, 2))) static int fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(failure, sizeof failure, format, values);
    if (report)
        _exit(write(report, failure, strlen(failure)) < 0 ? 2 : 1);
    return -1;
}

/* Return what a call returned, unless it failed; for several calls that return 0, must(-(one || two), …). */
static int must(int result, const char *what)
{
    return result < 0 ? fail("[ERROR] %s: %s", what, strerror(errno)) : result;
}

static int split_mounts(const char *text)
{
    char *entries = strdup(text), *entry, *flag;
    for (bound = OWN; (entry = strsep(&entries, ",")) && bound < MOST; bound++) {
        struct bind *bind = &binds[bound];
        bind->source = strsep(&entry, ":");
        bind->target = entry ? strsep(&entry, ":") : bind->source;
        if (!*bind->source || !*bind->target)
            return slurm_error("pyxis: --container-mounts: invalid format: %s", text), -1;
        while ((flag = strsep(&entry, "+")))
            bind->read_only |= !strcmp(flag, "ro");
    }
    return 0;
}

static int take(int option, const char *text, int remote)
{
    int number = option % OPTIONS, value = option / OPTIONS;
    if (number < TEXTS ? !*text : flags[number] == !value)
        return slurm_error("pyxis: argument required, or an option and its opposite were specified"), -1;
    if (number < TEXTS)
        texts[number] = strdup(text);
    else
        flags[number] = value;
    return number == MOUNTS ? split_mounts(text) : 0;
}

#define HELP "[stand-in for pyxis]"
static struct spank_option options[] = {
    {"container-image", "PATH", HELP, 1, IMAGE, take},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", HELP, 1, MOUNTS, take},
    {"container-workdir", "PATH", HELP, 1, WORKDIR, take},
    {"container-env", "NAME[,NAME...]", HELP, 1, ENV, take},
    {"container-name", "NAME", HELP, 1, NAME, take},
    {"container-mount-home", NULL, HELP, 0, HOME + OPTIONS, take},
    {"no-container-mount-home", NULL, HELP, 0, HOME, take},
    {"container-remap-root", NULL, HELP, 0, REMAP_ROOT + OPTIONS, take},
    {"no-container-remap-root", NULL, HELP, 0, REMAP_ROOT, take},
    {"container-writable", NULL, HELP, 0, WRITABLE + OPTIONS, take},
    {"container-readonly", NULL, HELP, 0, WRITABLE, take},
    SPANK_OPTIONS_TABLE_END};

int slurm_spank_init(spank_t spank, int count, char **words)
{
    if (count)
        snprintf(folder, sizeof folder, "%s", words[0]);
    for (struct spank_option *option = options; option->name; option++)
        spank_option_register(spank, option);
    return 0;
}

/* Make a folder or an empty file to mount on, and what lies above it; the user's, as all is that Enroot unpacks. */
static void make_place(const char *path, int is_folder)
{
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", path);
    for (char *slash = part + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        if (!mkdir(part, 0755))
            must(chown(part, uid, gid), part);
    }
    if (access(path, F_OK))
        must(-((is_folder ? mkdir(path, 0755) : mknod(path, S_IFREG | 0644, 0)) || chown(path, uid, gid)), path);
}

static int open_of(pid_t pid, const char *file, int mode)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    return must(open(path, mode | O_CLOEXEC), path);
}

/* Open a new user namespace, the user's, with one id: what `inside` is called there is the user outside. */
static int user_namespace(uid_t inside, gid_t group)
{
    pid_t pid = must(fork(), "fork");
    if (!pid) { /* it keeps root's capabilities: without, some systems give no such namespace */
        int failed = prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) || setresgid(gid, gid, gid);
        raise(failed || setresuid(uid, uid, uid) || unshare(CLONE_NEWUSER) ? SIGKILL : SIGSTOP);
    }
    waitpid(pid, NULL, WUNTRACED);
    must(dprintf(open_of(pid, "setgroups", O_WRONLY), "deny"), "user namespace");
    must(dprintf(open_of(pid, "uid_map", O_WRONLY), "%u %u 1", inside, uid), "user namespace");
    must(dprintf(open_of(pid, "gid_map", O_WRONLY), "%u %u 1", group, gid), "user namespace");
    int space = open_of(pid, "ns/user", O_RDONLY);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return space;
}

/* Make lower/ (the image), upper/ (what is written) and root/ here. What the image's root owns is the user's. */
static void unpack(char *here)
{
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_IDMAP};
    int status = 0;
    must(-(mount("tmpfs", here, "tmpfs", 0, "mode=0755") || chdir(here)), here);
    must(-(mkdir("lower", 0755) || mkdir("upper", 0755) || mkdir("work", 0755) || chown("upper", uid, gid)), here);
    if (!must(fork(), "fork")) /* mount(8) knows how to get a loop device that goes with the mount */
        must(execlp("mount", "mount", "-o", "loop,ro,nosuid,nodev", texts[IMAGE], "lower", NULL), "mount");
    if (wait(&status) < 0 || status)
        fail("[ERROR] File system corruption detected: %s", texts[IMAGE]);
    if (uid && (attr.userns_fd = user_namespace(0, 0))) {
        int tree = must(open_tree(AT_FDCWD, "lower", OPEN_TREE_CLONE), "lower");
        mount_setattr(tree, "", AT_EMPTY_PATH, &attr, sizeof attr); /* before Linux 6.2 root stays the owner */
        must(move_mount(tree, "", AT_FDCWD, "lower", MOVE_MOUNT_F_EMPTY_PATH), "lower");
    }
    must(mkdir("root", 0755), "root"); /* last: with it, a named container is there */
}

/* Make root/ the root; what is bound into it is opened before, on the host. */
static void enter_root(void)
{
    struct mount_attr read_only = {.attr_set = MOUNT_ATTR_RDONLY};
    for (struct bind *bind = binds; bind < binds + bound; bind++) {
        bind->tree = must(open_tree(AT_FDCWD, bind->source, OPEN_TREE_CLONE | AT_RECURSIVE), bind->source);
        if (bind->read_only)
            must(mount_setattr(bind->tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &read_only, sizeof read_only), "ro");
    }
    must(mount("overlay", "root", "overlay", 0, "lowerdir=lower,upperdir=upper,workdir=work"), "overlay");
    must(-(chdir("root") || syscall(SYS_pivot_root, ".", ".") || umount2(".", MNT_DETACH) || chdir("/")), "pivot_root");
    make_place("/tmp", 1);
    must(mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777"), "/tmp");
    make_place(home, 1);
    for (struct bind *bind = binds; bind < binds + bound; bind++) {
        struct stat status;
        must(fstat(bind->tree, &status), bind->target);
        make_place(bind->target, S_ISDIR(status.st_mode));
        must(move_mount(bind->tree, "", AT_FDCWD, bind->target, MOVE_MOUNT_F_EMPTY_PATH), bind->target);
    }
    if (flags[WRITABLE] != 1)
        must(mount_setattr(AT_FDCWD, "/", 0, &read_only, sizeof read_only), "/");
}

static void become_container(int unpacked, char *here)
{
    must(-(seteuid(0) || setegid(0)), "root");
    mkdir(here, 0755);
    if (texts[NAME] && !unpacked)
        unpack(here); /* into the node's namespace, where it stays */
    must(-(unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)), "mount namespace");
    if (!texts[NAME])
        unpack(here);
    must(chdir(here), here);
    enter_root();
    unsigned root = flags[REMAP_ROOT] == 1, inside = root ? 0 : uid, group = root ? 0 : gid;
    must(setns(user_namespace(inside, group), CLONE_NEWUSER), "user namespace");
    must(-(setresgid(group, group, group) || setresuid(inside, inside, inside) || unshare(CLONE_NEWNS)), "namespace");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    clearenv();
    setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", 1);
    setenv("HOME", home, 1);
    char line[8192], *name, *value;
    for (FILE *file = fopen("/etc/environment", "re"); file && fgets(value = line, sizeof line, file);)
        if ((name = strsep(&value, "=")) && value && *name != '#')
            setenv(name, strsep(&value, "\n"), 1);
    must(chdir(home), home); /* two shells: the second's environment is what the first, by /etc/profile, exports */
    must(execl("/bin/sh", "-sh", "-c", "exec sh -c 'kill -STOP $$'", NULL), "/bin/sh");
}

/* Look, as the user, for what was asked. */
static int find_image(void)
{
    char magic[4] = "", *path = texts[IMAGE], *found = path ? realpath(path, NULL) : NULL;
    if (!path)
        return fail("error: a container with name \"pyxis_%s\" does not exist, and --container-image is not set", texts[NAME]);
    if (!strchr("./", *path))
        return fail("failed to import docker image\n[ERROR] the stand-in for Pyxis reaches no registry: %s", path);
    if (!found)
        return fail("[ERROR] No such file or directory: %s", path);
    int image = open(texts[IMAGE] = found, O_RDONLY | O_CLOEXEC);
    if (read(image, magic, 4) != 4 || memcmp(magic, "hsqs", 4))
        return fail("[ERROR] Invalid image format: %s", path);
    return close(image);
}

static int start_container(void)
{
    char here[PATH_MAX], path[PATH_MAX + 8], host[65] = "";
    int ends[2], status = 0, unpacked = 0;
    struct passwd *entry = getpwuid(uid); /* not $HOME: Enroot asks the host's users too */
    snprintf(home, sizeof home, "%s", flags[REMAP_ROOT] == 1 ? "/root" : entry ? entry->pw_dir : "/");
    gethostname(host, sizeof host - 1);
    snprintf(here, sizeof here, texts[NAME] ? "%s/%s.%s" : "%s", folder, host, texts[NAME]);
    snprintf(path, sizeof path, "%s/root", here);
    if (!(unpacked = texts[NAME] && !access(path, F_OK)) && find_image())
        return -1;
    if (flags[HOME] == 1 && entry)
        binds[bound++] = (struct bind){entry->pw_dir, home, 0, 0};
    for (struct bind *bind = binds; bind < binds + bound; bind++) {
        char *source = realpath(bind->source, NULL);
        if (!source)
            return fail("--container-mounts: source path does not exist: %s", bind->source);
        bind->source = source;
    }
    pid_t pid = pipe2(ends, O_CLOEXEC) ? -1 : fork();
    if (must(pid, "fork") < 0)
        return -1;
    if (!pid && (report = ends[1]))
        become_container(unpacked, here);
    close(ends[1]);
    if (waitpid(pid, &status, WUNTRACED) < 0 || !WIFSTOPPED(status))
        return read(ends[0], failure, sizeof failure - 1) > 0 ? -1 : fail("container exited too soon");
    user_space = open_of(pid, "ns/user", O_RDONLY);
    mount_space = open_of(pid, "ns/mnt", O_RDONLY);
    FILE *file = fdopen(open_of(pid, "environ", O_RDONLY), "r");
    for (size_t size = 0; file && variables < MOST && getdelim(&environment[variables], &size, 0, file) > 0; size = 0)
        variables++;
    kill(pid, SIGKILL);
    return waitpid(pid, &status, 0);
}

int slurm_spank_user_init(spank_t spank, int count, char **words)
{
    if (!texts[IMAGE] && !texts[NAME])
        return 0;
    spank_get_item(spank, S_JOB_UID, &uid);
    spank_get_item(spank, S_JOB_GID, &gid);
    start_container();
    return 0; /* a failure is the tasks' to tell: from here srun would not hear of it */
}

int slurm_spank_task_init(spank_t spank, int count, char **words)
{
    char list[4096], quoted[4096], *place = texts[WORKDIR] ? texts[WORKDIR] : home;
    if (!texts[IMAGE] && !texts[NAME])
        return 0;
    snprintf(list, sizeof list, ",%s,", texts[ENV] ? texts[ENV] : "");
    for (int i = 0; i < variables; i++) {
        char *value = environment[i], *name = strsep(&value, "=");
        snprintf(quoted, sizeof quoted, ",%s,", name);
        if (!strstr(list, quoted) || spank_getenv(spank, name, quoted, sizeof quoted) == ESPANK_ENV_NOEXIST)
            spank_setenv(spank, name, value, 1);
    }
    if (!*failure && (setns(user_space, CLONE_NEWUSER) || setns(mount_space, CLONE_NEWNS) || chdir(place)))
        fail("couldn't chdir to %s: %s", place, strerror(errno));
    for (char *lines = *failure ? failure : NULL; lines;)
        slurm_error("pyxis: %s", strsep(&lines, "\n"));
    return *failure ? -1 : 0;
}
