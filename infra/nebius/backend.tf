# The state is in a bucket of the project, so it outlives this machine and the whole team shares it.
# .envrc creates the bucket and a key for it, and sets bucket, region and address for Terraform.
terraform {
  backend "s3" {
    key            = "soperator.tfstate"
    use_path_style = true

    # The server is not Amazon's.
    skip_credentials_validation = true
    skip_metadata_api_check     = true
    skip_region_validation      = true
    skip_requesting_account_id  = true
    skip_s3_checksum            = true
  }
}
