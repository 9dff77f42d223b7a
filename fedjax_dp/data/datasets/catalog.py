"""The one table of data sets: what they are, which files they need, where those are published."""

from fedjax_dp.data.datasets.files import DatasetInfo, Download, Source

_MNIST_HOSTS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
_FASHION_HOSTS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
_QMNIST_HOSTS = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
_ADULT_HOSTS = ("https://archive.ics.uci.edu/ml/machine-learning-databases/adult/",)
_HEART_HOSTS = ("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",)
_CIFAR_HOSTS = ("https://www.cs.toronto.edu/~kriz/",)
_TFF_HOSTS = ("https://storage.googleapis.com/tff-datasets-public/",)


def _download(
    hosts: tuple[str, ...], name: str, sha256: str, unpack: tuple[str, ...] = ()
) -> Download:
    return Download(name, sha256, tuple(host + name for host in hosts), unpack)


def _all_of(name: str, folders: tuple[str, ...], downloads: tuple[Download, ...]) -> Source:
    return Source(name, tuple(download.name for download in downloads), folders, downloads)


_MNIST = (
    _download(
        _MNIST_HOSTS,
        "train-images-idx3-ubyte.gz",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    _download(
        _MNIST_HOSTS,
        "train-labels-idx1-ubyte.gz",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    _download(
        _MNIST_HOSTS,
        "t10k-images-idx3-ubyte.gz",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    _download(
        _MNIST_HOSTS,
        "t10k-labels-idx1-ubyte.gz",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
)

_FASHION_MNIST = (
    _download(
        _FASHION_HOSTS,
        "train-images-idx3-ubyte.gz",
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    ),
    _download(
        _FASHION_HOSTS,
        "train-labels-idx1-ubyte.gz",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    ),
    _download(
        _FASHION_HOSTS,
        "t10k-images-idx3-ubyte.gz",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    ),
    _download(
        _FASHION_HOSTS,
        "t10k-labels-idx1-ubyte.gz",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
)

_QMNIST = (
    _download(
        _QMNIST_HOSTS,
        "qmnist-train-labels-idx2-int.gz",
        "2c05dc77f6b916b38e455e97ab129a42a444f3dbef09b278a366f82904e0dd9f",
    ),
    _download(
        _QMNIST_HOSTS,
        "qmnist-test-labels-idx2-int.gz",
        "9fbcbe594c3766fdf4f0b15c5165dc0d1e57ac604e01422608bb72c906030d06",
    ),
)

_EMNIST_ARCHIVE = Download(
    "gzip.zip",
    "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
    ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
)


def emnist(split: str = "byclass") -> DatasetInfo:
    """Describes one of the six ways in which EMNIST is published.

    Args:
      split: "byclass", "bymerge", "balanced", "letters", "digits" or "mnist".

    Returns:
      The description, with the file names of that split.
    """
    files = tuple(
        f"emnist-{split}-{part}-{kind}-ubyte.gz"
        for part in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    return DatasetInfo(
        "emnist",
        "handwritten digits and letters, 28x28, 814,255 images in 62 classes (byclass)",
        "none stated by the source (NIST, a work of the United States government)",
        (
            Source("idx", files, ("emnist", "EMNIST/raw", "emnist/gzip", "gzip", ".")),
            Source("zip", ("gzip.zip",), ("emnist", "EMNIST/raw"), (_EMNIST_ARCHIVE,)),
        ),
    )


CATALOG: dict[str, DatasetInfo] = {
    info.name: info
    for info in (
        DatasetInfo(
            "digits",
            "handwritten digits, 8x8, 1,797 images in 10 classes; comes with scikit-learn",
            "CC BY 4.0 (UCI, Optical Recognition of Handwritten Digits)",
            (),
        ),
        DatasetInfo(
            "mnist",
            "handwritten digits, 28x28, 60,000 + 10,000 images in 10 classes",
            "none stated by the source; commonly given as CC BY-SA 3.0",
            (_all_of("idx", ("mnist", "MNIST/raw"), _MNIST),),
        ),
        DatasetInfo(
            "fashion_mnist",
            "articles of clothing, 28x28, 60,000 + 10,000 images in 10 classes",
            "MIT (Zalando SE)",
            (_all_of("idx", ("fashion_mnist", "FashionMNIST/raw"), _FASHION_MNIST),),
        ),
        DatasetInfo(
            "mnist_by_writer",
            "MNIST by the person who wrote: 539 training and 297 other test clients",
            "MNIST: see mnist; writer ids: BSD style (QMNIST, Facebook)",
            (_all_of("idx", ("mnist", "MNIST/raw"), _MNIST + _QMNIST),),
        ),
        DatasetInfo(
            "fedcmnist",
            "MNIST in colours by digit, other ones in testing: 28x28x3, 60,000 + 10,000 images",
            "that of mnist, whose files it is made from",
            (_all_of("idx", ("mnist", "MNIST/raw"), _MNIST),),
        ),
        DatasetInfo(
            "fedrotmnist",
            "MNIST turned by digit in training, upright in testing: 60,000 + 10,000 images",
            "that of mnist, whose files it is made from",
            (_all_of("idx", ("mnist", "MNIST/raw"), _MNIST),),
        ),
        DatasetInfo(
            "cifar10",
            "small colour photographs, 32x32x3, 50,000 + 10,000 images in 10 classes",
            "none stated by the source (Krizhevsky 2009)",
            (
                Source(
                    "binary",
                    (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
                    ("cifar10/cifar-10-batches-bin", "cifar-10-batches-bin", "cifar10"),
                ),
                _all_of(
                    "binary archive",
                    ("cifar10", "."),
                    (
                        _download(
                            _CIFAR_HOSTS,
                            "cifar-10-binary.tar.gz",
                            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                        ),
                    ),
                ),
                Source(
                    "python",
                    (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
                    ("cifar10/cifar-10-batches-py", "cifar-10-batches-py", "cifar10"),
                ),
                _all_of(
                    "python archive",
                    ("cifar10", "."),
                    (
                        _download(
                            _CIFAR_HOSTS,
                            "cifar-10-python.tar.gz",
                            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                        ),
                    ),
                ),
                Source(
                    "images",
                    ("train", "test"),
                    ("cifar10", "cifar10_images", "cifar10_jpeg"),
                    note="folders train/CLASS/*.png and test/CLASS/*.png (or .jpg), needs pillow",
                ),
                Source(
                    "jpeg archive",
                    ("cifar10-jpeg-q75.tar.xz",),
                    ("cifar10_jpeg", "cifar10"),
                    note="the tree of images as JPEG files of quality 75 in one archive: lossy, so "
                    "accuracies differ a little from published ones",
                ),
            ),
        ),
        DatasetInfo(
            "tiny_imagenet",
            "photographs, 64x64x3, 100,000 + 10,000 images in 200 classes",
            "none stated by the source (Stanford CS231n; images of ImageNet, for research)",
            (
                Source(
                    "folder",
                    ("wnids.txt", "words.txt", "train", "val"),
                    ("tiny-imagenet-200", "tiny_imagenet", "tiny_imagenet/tiny-imagenet-200"),
                    note="the folder that tiny-imagenet-200.zip (cs231n.stanford.edu) unpacks to; "
                    "reading it needs the package pillow",
                ),
            ),
        ),
        emnist(),
        DatasetInfo(
            "femnist",
            "handwritten digits and letters, 28x28, in 62 classes, by writer (about 3,500 clients)",
            "none stated by the source (NIST Special Database 19)",
            (
                Source(
                    "leaf",
                    ("train", "test"),
                    ("femnist", "femnist/data"),
                    note="the JSON files that LEAF writes with `preprocess.sh -s niid --sf 1.0 "
                    "-k 0 -t sample` (github.com/TalwalkarLab/leaf, data/femnist)",
                ),
                Source(
                    "hdf5",
                    ("fed_emnist_train.h5", "fed_emnist_test.h5"),
                    ("femnist", "."),
                    (
                        _download(
                            _TFF_HOSTS,
                            "fed_emnist.tar.bz2",
                            "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
                            ("fed_emnist_train.h5", "fed_emnist_test.h5"),
                        ),
                    ),
                    note="reading it needs the package h5py",
                ),
            ),
        ),
        DatasetInfo(
            "adult",
            "census income above 50,000 dollars, 32,561 + 16,281 people, tabular",
            "CC BY 4.0 (UCI)",
            (
                _all_of(
                    "uci",
                    ("adult",),
                    (
                        _download(
                            _ADULT_HOSTS,
                            "adult.data",
                            "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
                        ),
                        _download(
                            _ADULT_HOSTS,
                            "adult.test",
                            "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
                        ),
                    ),
                ),
            ),
        ),
        DatasetInfo(
            "heart_disease",
            "heart disease at four hospitals (the clients), 920 patients, tabular",
            "CC BY 4.0 (UCI)",
            (
                _all_of(
                    "uci",
                    ("heart_disease",),
                    (
                        _download(
                            _HEART_HOSTS,
                            "processed.cleveland.data",
                            "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8",
                        ),
                        _download(
                            _HEART_HOSTS,
                            "processed.hungarian.data",
                            "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796",
                        ),
                        _download(
                            _HEART_HOSTS,
                            "processed.switzerland.data",
                            "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314",
                        ),
                        _download(
                            _HEART_HOSTS,
                            "processed.va.data",
                            "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f",
                        ),
                    ),
                ),
            ),
        ),
        DatasetInfo(
            "shakespeare",
            "Shakespeare's plays by role, next character, over a thousand clients",
            "public domain text",
            (
                Source(
                    "plays",
                    ("plays_by_role.jsonl.gz",),
                    ("shakespeare",),
                    note="one JSON object a line with `client` (play|ROLE) and `speeches` (a list "
                    "of texts, in order)",
                ),
                Source(
                    "hdf5",
                    ("shakespeare_train.h5", "shakespeare_test.h5"),
                    ("shakespeare", "."),
                    (
                        _download(
                            _TFF_HOSTS,
                            "shakespeare.tar.bz2",
                            "0285be9906cb5f268092eee4edeeacfc2af4574f2941f7cc2f08a321d7f5c707",
                            ("shakespeare_train.h5", "shakespeare_test.h5"),
                        ),
                    ),
                    note="reading it needs the package h5py",
                ),
            ),
        ),
        DatasetInfo(
            "tiny_shakespeare",
            "1.1 million characters of Shakespeare by role, next character, 300 clients",
            "public domain text",
            (
                Source(
                    "text",
                    ("input.txt",),
                    ("shakespeare", "tiny_shakespeare"),
                    (
                        Download(
                            "input.txt",
                            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                            (
                                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                                "tinyshakespeare/input.txt",
                            ),
                        ),
                    ),
                ),
            ),
        ),
        DatasetInfo(
            "kddcup99",
            "network connections, 494,021 rows of which 97,278 are normal, tabular",
            "CC BY 4.0 (UCI)",
            (
                Source(
                    "uci",
                    ("kddcup.data_10_percent.gz",),
                    ("kddcup99",),
                    (
                        Download(
                            "kddcup.data_10_percent.gz",
                            "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561",
                            (
                                "https://archive.ics.uci.edu/ml/machine-learning-databases/"
                                "kddcup99-mld/kddcup.data_10_percent.gz",
                                "http://kdd.ics.uci.edu/databases/kddcup99/"
                                "kddcup.data_10_percent.gz",
                            ),
                        ),
                    ),
                ),
            ),
        ),
        DatasetInfo(
            "table",
            "a table of your own, in CSV, Parquet or Arrow files, by the names of its columns",
            "that of your data",
            (),
        ),
    )
}
