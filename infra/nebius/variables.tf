variable "company_name" {
  description = "Name of the cluster and of everything in it: small letters, digits and dashes, at most 32."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,30}[a-z0-9]$", var.company_name))
    error_message = "company_name must start with a letter and hold 2 to 32 small letters, digits and dashes."
  }
}

variable "region" {
  description = "Nebius region, for example eu-north1."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}-[a-z]+[0-9]$", var.region))
    error_message = "region must look like eu-north1."
  }
}

variable "iam_project_id" {
  description = "Project that owns the resources (project-...)."
  type        = string

  validation {
    condition     = startswith(var.iam_project_id, "project-")
    error_message = "iam_project_id must start with project-."
  }
}

variable "iam_tenant_id" {
  description = "Tenant of the project (tenant-...)."
  type        = string

  validation {
    condition     = startswith(var.iam_tenant_id, "tenant-")
    error_message = "iam_tenant_id must start with tenant-."
  }
}

variable "iam_token" {
  description = "Short-lived IAM token; .envrc sets it. Never in a file."
  type        = string
  sensitive   = true

  validation {
    condition     = length(var.iam_token) > 0
    error_message = "iam_token is empty: source .envrc first."
  }
}

variable "vpc_subnet_id" {
  description = "Subnet of the nodes (vpcsubnet-...)."
  type        = string

  validation {
    condition     = startswith(var.vpc_subnet_id, "vpcsubnet-")
    error_message = "vpc_subnet_id must start with vpcsubnet-."
  }
}

variable "k8s_version" {
  description = "Kubernetes version, major.minor."
  type        = string
  default     = "1.32"

  validation {
    condition     = can(regex("^1\\.[0-9]+$", var.k8s_version))
    error_message = "k8s_version must look like 1.32."
  }
}

variable "slurm_nodeset_workers" {
  description = "GPU nodes: how many, which machine, which boot disk."
  type = list(object({
    size = number
    resource = object({
      platform = string
      preset   = string
    })
    boot_disk = object({
      type                 = string
      size_gibibytes       = number
      block_size_kibibytes = number
    })
  }))

  validation {
    condition     = length(var.slurm_nodeset_workers) > 0
    error_message = "slurm_nodeset_workers needs at least one node set."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : set.size >= 1 && floor(set.size) == set.size])
    error_message = "slurm_nodeset_workers: size must be a whole number from 1."
  }

  validation {
    condition = alltrue([
      for set in var.slurm_nodeset_workers : contains(["gpu-h100-sxm", "gpu-h200-sxm", "gpu-b200-sxm"], set.resource.platform)
    ])
    error_message = "slurm_nodeset_workers: platform must be gpu-h100-sxm, gpu-h200-sxm or gpu-b200-sxm."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : can(regex("^[18]gpu-[0-9]+vcpu-[0-9]+gb$", set.resource.preset))])
    error_message = "slurm_nodeset_workers: preset must look like 1gpu-16vcpu-200gb or 8gpu-128vcpu-1600gb."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : set.boot_disk.size_gibibytes >= 512])
    error_message = "slurm_nodeset_workers: boot_disk.size_gibibytes must be at least 512; images and logs fill less within days."
  }

  validation {
    condition = alltrue([
      for set in var.slurm_nodeset_workers : contains(["NETWORK_SSD", "NETWORK_SSD_NON_REPLICATED", "NETWORK_SSD_IO_M3"], set.boot_disk.type)
    ])
    error_message = "slurm_nodeset_workers: boot_disk.type must be NETWORK_SSD, NETWORK_SSD_NON_REPLICATED or NETWORK_SSD_IO_M3."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : contains([4, 8, 16, 32, 64, 128], set.boot_disk.block_size_kibibytes)])
    error_message = "slurm_nodeset_workers: boot_disk.block_size_kibibytes must be a power of two from 4 to 128."
  }
}

variable "infiniband_fabric" {
  description = "InfiniBand fabric of the region for nodes with 8 GPUs; empty for nodes with one."
  type        = string
  default     = ""
}

variable "filestore_jail" {
  description = "The shared root file system of all Slurm nodes."
  type = object({
    size_gibibytes       = number
    block_size_kibibytes = number
  })
  default = {
    size_gibibytes       = 2048
    block_size_kibibytes = 4
  }

  validation {
    condition     = var.filestore_jail.size_gibibytes >= 64
    error_message = "filestore_jail.size_gibibytes must be at least 64."
  }
}

variable "filestore_jail_submounts" {
  description = "Further shared file systems and where they are mounted."
  type = list(object({
    name       = string
    mount_path = string
    spec = object({
      size_gibibytes       = number
      block_size_kibibytes = number
    })
  }))
  default = []

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : can(regex("^/[a-z]", mount.mount_path))])
    error_message = "filestore_jail_submounts: mount_path must be an absolute path."
  }

  validation {
    condition     = length(distinct([for mount in var.filestore_jail_submounts : mount.name])) == length(var.filestore_jail_submounts)
    error_message = "filestore_jail_submounts: each name may be used once."
  }

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : can(regex("^[a-z][a-z0-9-]*$", mount.name))])
    error_message = "filestore_jail_submounts: a name holds small letters, digits and dashes."
  }

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : mount.spec.size_gibibytes >= 1])
    error_message = "filestore_jail_submounts: spec.size_gibibytes must be at least 1."
  }
}

variable "slurm_login_ssh_root_public_keys" {
  description = "Public keys that may log in as root."
  type        = list(string)

  validation {
    condition = length(var.slurm_login_ssh_root_public_keys) > 0 && alltrue([
      for key in var.slurm_login_ssh_root_public_keys : can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+) [A-Za-z0-9+/=.]+", key))
    ])
    error_message = "slurm_login_ssh_root_public_keys needs at least one public key (ssh-ed25519 AAAA... you@example.com)."
  }
}

variable "soperator_charts" {
  description = "OCI folder and version of the SOperator charts, as Nebius publishes them."
  type = object({
    repository = string
    version    = string
  })

  validation {
    condition     = startswith(var.soperator_charts.repository, "oci://") && can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+", var.soperator_charts.version))
    error_message = "soperator_charts must be an oci:// repository and a version such as 1.22.1."
  }
}
