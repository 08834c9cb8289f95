"""The list of what looks like a secret: real formats are found, ordinary values are not."""

from __future__ import annotations

import pytest

from imgkit_entrypoints import secret_patterns

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789ABCD"

SECRETS = (
    f"ghp_{LETTERS[:36]}",
    f"github_pat_{LETTERS}22",
    "glpat-abcdefghij0123456789",
    f"hf_{LETTERS[:34]}",
    f"pypi-{LETTERS}{LETTERS}",
    f"npm_{LETTERS[:36]}",
    "dckr_pat_abcdefghij0123456789",
    f"sk-proj-{LETTERS}",
    f"nvapi-{LETTERS}",
    "AKIAABCDEFGHIJKLMNOP",
    "xoxb-0123456789-abcdef",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    "https://ana:hunter2@example.org/simple",
    "redis://:hunter2@cache",
    "http://ana:hun@ter2@proxy:3128",
    "git+https://abcdefghij0123456789@example.org/x.git",
    "curl -H 'Authorization: Bearer abcdefgh123' https://example.org",
    "curl -sSf -u ana:hunter2 https://example.org",
    "huggingface-cli login --token abcdefgh",
    "mysql --password=hunter22",
    f"WANDB_API_KEY={LETTERS} wandb login",
    "export DB_PASS='hunter2'",
    "MY_SECRET=hunter2 make",
    "run: MY_SECRET=hunter2 make",
    '{"model": "a", "api_key": "hunter2"}',
)
HARMLESS = (
    "",
    "https://example.org:8080/simple",
    "https://ana:$PASSWORD@example.org",
    "pip install --token $TOKEN x",
    "curl -u $USER:$PASSWORD https://example.org",
    "curl -u ana:$(cat /run/secrets/pw) https://example.org",
    "TOKEN=$(cat /run/secrets/token) make",
    'HF_TOKEN="${HF_TOKEN}" make',
    "TOKENIZERS_PARALLELISM=false python train.py",
    "MAX_TOKENS=8k EOS_TOKEN=</s> IMAGE_KEY=pixel_values python train.py",
    "NCCL_IB_PKEY=0x8001",
    "SSH_KEY=/run/secrets/key make",
    "git@example.org:group/project.git",
    "-----BEGIN CERTIFICATE-----",
    "docker run -u 1000:1000 image",
    '{"pad_token": "x", "token": "<s>", "password": null, "api_key": ""}',
)


@pytest.mark.parametrize("text", SECRETS)
def test_formats_of_secrets_are_found(text):
    assert secret_patterns.find_secret(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_values_are_no_secrets(text):
    assert secret_patterns.find_secret(text) == ""
    assert secret_patterns.mask_secrets(text) == text


@pytest.mark.parametrize("text", SECRETS)
def test_stars_hide_the_secret_and_keep_columns(text):
    hidden = secret_patterns.mask_secrets(f"before {text} after")
    assert len(hidden) == len(f"before {text} after")
    assert hidden.startswith("before ")
    assert hidden.endswith(" after")
    for part in ("hunter2", "ter2", LETTERS[:20], "abcdefgh123", "b3BlbnNzaC1rZXk", "c2lnbmF0dXJl"):
        assert part not in hidden


def test_stars_keep_the_place_of_a_password():
    masked = secret_patterns.mask_secrets("https_proxy=http://ana:pw@proxy:3128")
    assert masked == "https_proxy=http://******@proxy:3128"


SUSPICIOUS_NAMES = """
HF_TOKEN=x1 wandb_api_key=x1 DB_PASSWORD=x1 PGPASSWORD=x1 MYSQL_PWD=x1 SLURM_JWT=x1 MYPASS=x1
MUNGE_KEY=abcdef0123456789 AWS_SECRET_ACCESS_KEY=x1 SESSION_COOKIE=x1
"""
ORDINARY_NAMES = """
PWD=/home/ana HF_TOKEN=$TOKEN SORT_KEY=date TOKENIZERS_PARALLELISM=x SECRET_FILE=x COMPASS=x PAD_TOKEN=[PAD]
"""


@pytest.mark.parametrize("setting", [*SUSPICIOUS_NAMES.split(), *ORDINARY_NAMES.split()])
def test_names_of_secrets_are_found(setting):
    name, _, value = setting.partition("=")
    assert secret_patterns.is_secret(name, value) == (setting in SUSPICIOUS_NAMES.split())


SECRET_ARGUMENTS = f"""
--token hf_{LETTERS[:34]}
--hub_token=hf_{LETTERS[:34]}
--trigger-token {LETTERS[:30]}
--token x
--password x
--password=x
--db-password x
-password x
--hf-token x1
--api-key x
--wandb_api_key=x
--secret x
--aws-secret-access-key x
--auth-token x
WANDB_API_KEY=x
env A=1 MYPASS=x python a.py
model.api_key=x
--env HF_TOKEN=x
-e MY_SECRET=x
--comment=PASSWORD=x
curl -u ana:hunter2 https://example.org
--index-url https://ana:hunter2@example.org/simple
"""
ORDINARY_ARGUMENTS = """
--tokenizer gpt2
--max-tokens 4096
--num-tokens 4k
--tokens-per-sample=512
--token-type x
--token-file t
--password-file secrets/pw
--secret-file f
--secret-name mine
--api-key-file k
SECRET_FILE=/run/x
SECRET_FILE=x
HF_TOKEN_PATH=t
TOKENIZERS_PARALLELISM=false
--api-key $WANDB_API_KEY
--token ${X}
--token=$(cat /run/secrets/t)
WANDB_API_KEY=$KEY
--pad-token [PAD]
--eos-token </s>
tokenizer.pad_token=PAD
--initializer_token toy
--token-dropout 0.1
--trigger-token sks
--use-auth-token true
--require-secret train.py
--key pixel_values
--sort-key date
--pat x
--first-pass gemm
--compass n
--bypass x
--pass-local-rank main.py
--secret
--password --user ana
--password 1234
--token none
"""


@pytest.mark.parametrize("text", SECRET_ARGUMENTS.strip().splitlines())
def test_secrets_among_arguments_are_found_and_not_repeated(text):
    description = secret_patterns.find_secret_argument(["dist-run", "train.py", *text.split()])
    assert description
    assert not any(value in description for value in ("hunter2", LETTERS[:20], "=x"))


@pytest.mark.parametrize("text", ORDINARY_ARGUMENTS.strip().splitlines())
def test_ordinary_arguments_are_no_secrets(text):
    assert secret_patterns.find_secret_argument(["dist-run", "train.py", *text.split()]) == ""


SUSPICIOUS_FILES = """
.env a/.env .env.local .ENV .netrc .pypirc .npmrc id_ed25519 a/id_rsa server.pem tls.KEY .ssh/ a/.aws/
.docker/config.json a/.config/gh/ .kube/
"""
ORDINARY_FILES = """
.env.example .env/ env.py id_map.json a/id_list.csv .docker/ docker/config.json .docker/Dockerfile pem.py
keys.txt ssh/ .ssh/known_hosts tokens.bin
"""


@pytest.mark.parametrize("path", [*SUSPICIOUS_FILES.split(), *ORDINARY_FILES.split()])
def test_names_of_secret_files_are_found(path):
    assert secret_patterns.is_secret_file(path) == (path in SUSPICIOUS_FILES.split())


@pytest.mark.parametrize(
    "text",
    [
        "env: {HF_TOKEN: hunter2}",
        "run: HF_TOKEN=hunter2",
        'env: {"HF_TOKEN": "hunter2 x"}',
        "{A: 1, HF_TOKEN: 'hunter2'}",
        "command: env A=1 HF_TOKEN=hunter2 B=2 make",
        f"HF_TOKEN={'x' * 500}hunter2",
    ],
)
def test_stars_hide_a_value_by_its_name(text):
    assert "hunter2" not in secret_patterns.mask_secrets(text)
    assert secret_patterns.mask_secrets(text).replace("*", "") != text
